"""Fit the last layer, then train all: horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.head"""

import argparse
import time
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
parser.add_argument("--model", default="resnet18", help="a torchvision classifier")
parser.add_argument("--weights", default=None, help="torchvision's name of its weights, such as DEFAULT")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
parser.add_argument("--samples", type=int, default=512)


def main(args: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    """Fit the last layer, train all layers; return the model and the test accuracy after the fit and each epoch."""
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
    began = time.perf_counter()
    hvfreeze.fit_head(model, loader)
    found = [accuracy(model, test_loader)]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        found.append(accuracy(model, test_loader))
    if hvd.rank() == 0:
        told = ", ".join(f"{100 * right:.1f} %" for right in found)
        print(f"test accuracy after the fit and each epoch: {told}; {time.perf_counter() - began:.1f} s", flush=True)
    return model, found


if __name__ == "__main__":
    main(parser.parse_args())
