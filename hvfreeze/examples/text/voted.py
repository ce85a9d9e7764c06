"""Train a transformer on short reviews: horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.text.NAME

NAME is `plain`: Horovod alone; `voted`: blocks are frozen by vote; or `cached`: and their output is cached.
"""

import argparse
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvfreeze
from hvfreeze.examples.text.reviews import Classifier, reviews

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=16, help="samples of each rank and step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--samples", type=int, default=512)


def main(args: argparse.Namespace) -> tuple[nn.Module, Any, list[float]]:
    """Train; return the model, the optimizer and each epoch's last loss."""
    hvd.init()
    torch.manual_seed(0)
    epochs, train_set = args.epochs, reviews(args.samples)
    sampler: Any = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader: Any = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    steps, tokens = len(loader), train_set.tensors[0]

    model = Classifier()
    opt: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    opt = hvfreeze.DistributedOptimizer(opt, model=model, example=tokens[:2], steps_per_epoch=steps, num_epochs=epochs)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps * epochs)

    losses = []
    for epoch in range(epochs):
        model.train()
        loader.sampler.set_epoch(epoch)
        for tokens, praise in loader:
            loss = functional.cross_entropy(model(tokens), praise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            scheduler.step()
        losses.append(loss.item())
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    return model, opt, losses


if __name__ == "__main__":
    main(parser.parse_args())
