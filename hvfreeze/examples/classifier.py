"""A head on the features of all blocks, compared with plain Horovod.

horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.classifier --weights DEFAULT
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvfreeze
from hvfreeze.examples.data import digits
from hvfreeze.examples.image import accuracy
from hvfreeze.torchvision_shim import torchvision

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--model", default="resnet18", help="a torchvision classifier that ends in a layer fc")
parser.add_argument("--weights", default=None, help="torchvision's name of its weights, such as DEFAULT")
parser.add_argument("--epochs", type=int, default=1, help="epochs of plain Horovod; 0 skips it")
parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
parser.add_argument("--samples", type=int, default=512)


def train(model: nn.Module, loader: Any, epochs: int) -> nn.Module:
    """Train all layers with `hvd.DistributedOptimizer`; return the model."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(epochs):
        model.train()
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def main(args: argparse.Namespace) -> dict[str, float]:
    """Fit a classifier, then train in plain Horovod; return the test accuracy of both."""
    hvd.init()
    torch.manual_seed(0)
    train_set, test_set = digits(args.samples)
    sampler: Any = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader: Any = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_sampler: Any = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)

    model: Any = torchvision.models.get_model(args.model, weights=args.weights)
    model.fc = nn.Linear(model.fc.in_features, 10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    ways: dict[str, Callable[[], nn.Module]] = {
        "hvfreeze.fit_classifier": lambda: hvfreeze.fit_classifier(model, loader).classifier,
        f"plain Horovod, {args.epochs} epochs": lambda: train(model, loader, args.epochs),
    }
    found = {}
    for way, make in ways.items():
        began = time.perf_counter()
        classifier = make()
        seconds = time.perf_counter() - began
        found[way] = accuracy(classifier, test_loader)
        if hvd.rank() == 0:
            print(f"{way}: test accuracy {100 * found[way]:.1f} %, {seconds:.1f} s", flush=True)
    return found


if __name__ == "__main__":
    main(parser.parse_args())
