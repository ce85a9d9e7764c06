"""Which steps make a block, by a named scheme or by a list of the modules that start one, and what each block owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from hvfreeze.chain.steps import Layout, Step
from hvfreeze.errors import UsageError

Group = tuple[str, tuple[Step, ...]]
NAMES_SHOWN = 16


def group_steps(layout: Layout, *, scheme: str) -> list[Group]:
    """Return the blocks of `scheme` in forward order, each with its name and steps.

    Args:
        layout: the model's steps.
        scheme: one of the layout's schemes, or NAME,NAME,...

    Raises:
        UsageError: a name starts no step, or stands out of forward order.
    """
    starts = layout.schemes.get(scheme) or _named_starts(layout, scheme)
    blocks = {leaf: block for block, leaf in starts.items()}
    groups: list[tuple[str, list[Step]]] = []
    for step in _opened(layout.steps, set(blocks)):
        first = step.leaves[0].name
        if first in blocks:
            groups.append((blocks[first], []))
        groups[-1][1].append(step)
    return [(block, tuple(steps)) for block, steps in groups]


class Ownership:
    """Which blocks run a module or use a parameter or buffer, by its dotted name in the model."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._claimed: dict[str, set[int]] = {}
        self._inside: dict[str, set[int]] = {}
        for index, (_, steps) in enumerate(groups):
            for own in [own for step in steps for own in step.owns]:
                self._claimed.setdefault(own, set()).add(index)
                for around in _containers(own):
                    self._inside.setdefault(around, set()).add(index)

    def blocks_with(self, name: str) -> set[int]:
        """Return the indices of the blocks that own `name`, what contains it, or a part of it."""
        claims = [self._claimed.get(path, set()) for path in (name, *_containers(name))]
        return set().union(*claims, self._inside.get(name, set()))


class Owned(NamedTuple):
    """What a block has of a model: modules that run in it alone, and names of parameters and buffers."""

    modules: tuple[nn.Module, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def owned_by(model: nn.Module, groups: Sequence[Group]) -> list[Owned]:
    """Return what each block has; every parameter and buffer belongs to exactly one.

    Raises:
        UsageError: there is no block, a name is there twice, or a tensor belongs to no block or to several.
    """
    names = [name for name, _ in groups]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"blocks ({', '.join(names)}): there must be at least one, and no name twice")
    owners = Ownership(groups)
    parameters = _members(model.named_parameters(remove_duplicate=False), owners, names)
    buffers = _members(model.named_buffers(remove_duplicate=False), owners, names)
    modules: list[list[nn.Module]] = [[] for _ in groups]
    for path, module in model.named_modules():
        found = owners.blocks_with(path)
        if path and len(found) == 1:
            modules[min(found)].append(module)
    each = zip(modules, parameters, buffers, strict=True)
    return [Owned(tuple(inside), tuple(trained), tuple(kept)) for inside, trained, kept in each]


def _members(tensors: Iterable[tuple[str, Tensor]], owners: Ownership, blocks: Sequence[str]) -> list[list[str]]:
    """Return the names of each block's tensors, in the order of `tensors`; a tensor with two names has the first."""
    members: list[list[str]] = [[] for _ in blocks]
    seen: dict[int, set[int]] = {}
    for name, tensor in tensors:
        users = owners.blocks_with(name) | seen.get(id(tensor), set())
        if not users:
            raise UsageError(
                f"blocks ({', '.join(blocks)}): {name} belongs to none of them. Name blocks that run all of the model; "
                "with Chain.from_modules say in owns= what functions use"
            )
        if len(users) > 1:
            shared = " and ".join(blocks[index] for index in sorted(users))
            raise UsageError(f"blocks ({', '.join(blocks)}): {name} is used by {shared}; join them into one block")
        if id(tensor) not in seen:
            members[min(users)].append(name)
        seen[id(tensor)] = users
    return members


def _containers(name: str) -> list[str]:
    return [name[:dot] for dot, letter in enumerate(name) if letter == "."]


def _opened(steps: Iterable[Step], starts: set[str]) -> Iterator[Step]:
    """Yield the steps, in parts where a block starts inside one."""
    for step in steps:
        if any(leaf.name in starts for leaf in step.leaves[1:]):
            yield from _opened(step.parts, starts)
        else:
            yield step


def _named_starts(layout: Layout, scheme: str) -> Mapping[str, str]:
    """Return block name -> name of the finest step that it starts with; what runs before the first is a block too."""
    leaves = [leaf.name for step in layout.steps for leaf in step.leaves]
    starts: dict[str, str] = {}
    reached = -1
    for name in [name.strip() for name in scheme.split(",")]:
        inside = [index for index, leaf in enumerate(leaves) if leaf == name or leaf.startswith(f"{name}.")]
        if not inside:
            raise UsageError(_cannot_start(layout, scheme, name))
        if inside[0] <= reached:
            raise UsageError(
                f"blocks ({scheme}): {name} does not run after {list(starts)[-1]}; list names in forward order"
            )
        reached = inside[0]
        starts[name] = leaves[reached]
    return starts if leaves[0] in starts.values() else {leaves[0]: leaves[0], **starts}


def _cannot_start(layout: Layout, scheme: str, name: str) -> str:
    leaves = [leaf for step in layout.steps for leaf in step.leaves]
    around = [leaf.name for leaf in leaves if any(name == own or name.startswith(f"{own}.") for own in leaf.owns)]
    why = f"{name} runs inside {around[0]}, which is not divided" if around else f"there is no module {name!r}"
    names = [step.name for step in layout.steps]
    known = ", ".join([*names[:NAMES_SHOWN], "..."] if len(names) > NAMES_SHOWN else names)
    schemes = ", ".join(layout.schemes)
    return f"blocks ({scheme}): {why}; give {schemes}, or names that start a block, in forward order, out of {known}"
