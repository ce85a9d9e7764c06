"""Independent Subnet Training as one process does it: what ranks that train pieces of an MLP must equal.

The method of Yuan et al. (VLDB 2022, arXiv 1910.02120), written with PyTorch and nothing of the strategy. At the
beginning of a round the hidden neurons of every layer are shuffled, owner by owner, and dealt out in turn; each worker
has the network of its neurons alone, makes J steps of SGD with it, and puts it back where it was. Who looks at the
whole network gives BatchNorm the statistics of the workers' last batches, pooled by the law of total variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.parallel.twins import Batch, pool_norms

DEALING = 0x646561


class Workers:
    """n workers on one MLP: `hidden1.linear`, `hidden1.norm`, ..., `head.linear`, `head.norm`.

    Args:
        model: the initial model; it is trained in place.
        number: of workers.
        local_steps: of a round.
        seed: of the deals.
        options: of SGD.
    """

    def __init__(self, model: Any, *, number: int, local_steps: int, seed: int, **options: float) -> None:
        self.model, self.number, self.local_steps, self.seed, self.options = model, number, local_steps, seed, options
        self.rounds = self.done = 0
        self.hands: list[list[np.ndarray[Any, Any]]] = []
        self.pieces: list[nn.Sequential] = []
        self.optimizers: list[torch.optim.SGD] = []
        self.last: Sequence[Batch] = ()

    def step(self, batches: Sequence[Batch]) -> None:
        """Make a step, a batch a worker."""
        if self.done == 0:
            self.hands = [self.deal(layer, width) for layer, width in enumerate(self.model.widths)]
            self.pieces = [self.piece(worker) for worker in range(self.number)]
            self.optimizers = [torch.optim.SGD(piece.parameters(), **self.options) for piece in self.pieces]
        for piece, optimizer, (inputs, labels) in zip(self.pieces, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(piece(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.last, self.done = batches, self.done + 1
        if self.done == self.local_steps:
            for worker in range(self.number):
                self.put_back(self.model, worker)
            self.rounds, self.done = self.rounds + 1, 0

    def deal(self, layer: int, width: int) -> list[np.ndarray[Any, Any]]:
        """Return each worker's neurons of a hidden layer."""
        generator = np.random.default_rng([DEALING, self.seed, self.rounds, layer])
        order = [
            neuron for own in np.array_split(np.arange(width), self.number) for neuron in generator.permutation(own)
        ]
        return [np.array(sorted(order[worker :: self.number])) for worker in range(self.number)]

    def entries(self, worker: int) -> list[tuple[str, list[Any]]]:
        """Return each parameter's name and the rows and columns that a worker has of it."""
        found: list[tuple[str, list[Any]]] = []
        for layer in range(len(self.hands)):
            columns = self.hands[layer - 1][worker] if layer else slice(None)
            rows = self.hands[layer][worker]
            found.append((f"hidden{layer + 1}.linear.weight", [rows, columns]))
            found += [(f"hidden{layer + 1}.norm.{name}", [rows]) for name in ("weight", "bias")]
        return [*found, ("head.linear.weight", [slice(None), self.hands[-1][worker]])]

    def piece(self, worker: int) -> nn.Sequential:
        """Return a worker's network, in training mode."""
        layers: list[nn.Module] = []
        for name, chosen in self.entries(worker):
            values = block(self.model.get_parameter(name).detach(), chosen).clone()
            if name.endswith("linear.weight"):
                layers.append(nn.Linear(values.shape[1], values.shape[0], bias=False))
                if name.startswith("hidden"):
                    layers += [nn.BatchNorm1d(values.shape[0]), nn.ReLU()]
            owner = layers[-1] if name.startswith("head") else layers[-2 if "norm" in name else -3]
            setattr(owner, name.rsplit(".", 1)[1], nn.Parameter(values.contiguous()))
        return nn.Sequential(*layers, nn.BatchNorm1d(self.model.classes, affine=False))

    @torch.no_grad()
    def put_back(self, model: nn.Module, worker: int) -> None:
        """Write what a worker has learnt where it belongs."""
        for (name, chosen), values in zip(self.entries(worker), self.pieces[worker].parameters(), strict=True):
            block(model.get_parameter(name).data, chosen, values.detach())

    @torch.no_grad()
    def seen(self) -> nn.Module:
        """Return the network that is evaluated and kept."""
        model = deepcopy(self.model).train()
        for worker in range(self.number if self.done else 0):
            self.put_back(model, worker)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
        found = []
        for inputs, _ in self.last:
            for norm in norms:
                norm.momentum = 1.0
            model(inputs)
            found.append([(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms])  # type: ignore[union-attr]
        for norm, *seen in zip(norms, *found, strict=True):
            pool_norms([norm], seen)
            norm.num_batches_tracked.zero_()  # type: ignore[union-attr]
        return model


def block(values: Tensor, chosen: Sequence[Any], new: Tensor | None = None) -> Tensor:
    """Return the chosen rows and columns, or write them."""
    full = [np.arange(length)[one] if isinstance(one, slice) else one for length, one in zip(values.shape, chosen)]
    if new is not None:
        values[np.ix_(*full)] = new
    return values[np.ix_(*full)]
