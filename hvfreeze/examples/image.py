"""Voted freezing and cache: horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.image"""

import argparse
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvfreeze
from hvfreeze.examples.data import digits
from hvfreeze.torchvision_shim import torchvision

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--model", default="resnet18", help="a torchvision classifier")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--cache-dir", default="activations")


def train(epoch: int, model: nn.Module, loader: Any, optimizer: Any, scheduler: Any) -> float:
    """Train for an epoch; return the last step's loss."""
    model.train()
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(loader.suffix(images), labels)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()
    return float(loss.detach())


@torch.no_grad()
def accuracy(model: nn.Module, loader: Any) -> float:
    """Return the test accuracy over all ranks."""
    model.eval()
    right = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return float(hvd.allreduce(torch.cat(right).mean(), name="accuracy"))


def main(args: argparse.Namespace) -> tuple[nn.Module, Any, list[float]]:
    """Train and test; return the model, the optimizer and each epoch's last loss."""
    hvd.init()
    torch.manual_seed(0)
    train_set, test_set = digits(args.samples)
    sampler: Any = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader: Any = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_sampler: Any = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)
    steps, lr = len(loader), 1e-3 * hvd.size()

    model: nn.Module = torchvision.models.get_model(args.model, num_classes=10)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr)
    optimizer = hvfreeze.DistributedOptimizer(optimizer, model=model, steps_per_epoch=steps, num_epochs=args.epochs)
    loader = hvfreeze.CachedLoader(loader, optimizer, directory=args.cache_dir)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps * args.epochs + 1)

    losses = []
    for epoch in range(args.epochs):
        losses.append(train(epoch, model, loader, optimizer, scheduler))
        right = accuracy(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {100 * right:.1f} %", flush=True)
    return model, optimizer, losses


if __name__ == "__main__":
    main(parser.parse_args())
