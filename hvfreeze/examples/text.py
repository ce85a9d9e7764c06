"""Voted freezing and cache: horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.text"""

from typing import Any

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvfreeze
from hvfreeze.examples.data import TextClassifier, reviews


def main(epochs: int = 8, samples: int = 512, batch_size: int = 16, cache_dir: str = "activations") -> Any:
    """Train; return the model, the optimizer and each epoch's last loss."""
    hvd.init()
    torch.manual_seed(0)
    train_set = reviews(samples)
    sampler: Any = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader: Any = DataLoader(train_set, batch_size=batch_size, sampler=sampler, drop_last=True)
    steps = len(loader)

    model = TextClassifier()
    opt: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # In plain Horovod: hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters()), and no CachedLoader
    opt = hvfreeze.DistributedOptimizer(opt, model=model, steps_per_epoch=steps, num_epochs=epochs)
    loader = hvfreeze.CachedLoader(loader, opt, directory=cache_dir)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps * epochs)

    losses = []
    for epoch in range(epochs):
        model.train()
        loader.sampler.set_epoch(epoch)
        for tokens, praise in loader:
            # In plain Horovod: model(tokens)
            loss = functional.cross_entropy(loader.suffix(tokens), praise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            scheduler.step()
        losses.append(loss.item())
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    return model, opt, losses


if __name__ == "__main__":
    main()
