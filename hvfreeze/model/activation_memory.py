"""Memory that a training step needs for activations, and a note if the machine has less."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvfreeze.memory import available_bytes
from hvfreeze.model.modes import state_kept
from hvfreeze.wording import plural

MEASURED_SAMPLES = 2
"""Samples of the measured forward pass: BatchNorm cannot normalise one sample with maps of one pixel."""


def activation_bytes(model: nn.Module, image_shape: Sequence[int]) -> int:
    """Return the bytes that autograd saves in a forward pass of a sample of (C, H, W), apart from the parameters.

    Tensors that share memory are counted once.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            # The tensor is kept, or its address would be given to another.
            saved[storage.data_ptr()] = tensor
        return tensor

    with state_kept(model), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()
        output = model(torch.zeros(MEASURED_SAMPLES, *image_shape))
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) // MEASURED_SAMPLES


def note_on_memory(model: nn.Module, image_shape: Sequence[int], *, batch_size: int, ranks: int) -> list[str]:
    """Return a note if batches of `batch_size` images on `ranks` ranks of this machine need more memory than it has.

    The user chooses what to do: smaller batches change the statistics of BatchNorm.
    """
    needed, available = batch_size * activation_bytes(model, image_shape), available_bytes(processes=ranks)
    if ranks * needed <= available:
        return []
    parts = 2
    while parts < batch_size and ranks * needed > parts * available:
        parts *= 2
    smaller, gib = max(1, batch_size // parts), 2**30
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    need = f"activations of {plural(batch_size, 'image')} need up to {needed / gib:.1f} GiB{each}"
    share = smaller * needed / batch_size / gib
    way = f"--batch-size {smaller} --accumulate {batch_size // smaller} needs {share:.1f} GiB"
    return [f"{need}, but {available / gib:.1f} GiB are free, and a process without memory is killed; {way}"]
