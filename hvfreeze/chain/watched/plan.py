"""How a model is taken apart, from what it calls: its parts in forward order, and which of them start a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.chain.watched.calls import Call
from hvfreeze.errors import UsageError

LARGEST_SHARE = 0.5
"""A part with more of the model's parameters is taken apart further, where it is made of parts."""
CONTAINERS = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder)
"""Those of torch.nn; every other class there is one layer."""


def as_defined(model: nn.Module) -> list[Call]:
    """Return a call of each submodule, in the order of definition, by the module that would call it."""
    lists = {name for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))}

    def parent_of(name: str) -> str:
        parent = name.rpartition(".")[0]
        return parent_of(parent) if parent in lists else parent

    return [Call(name, parent_of(name), None) for name, _ in model.named_modules() if name and name not in lists]


@dataclass
class Plan:
    """How a model is taken apart: its parts in forward order, and which of them start a block."""

    model: nn.Module
    calls: Sequence[Call]
    starts: Sequence[str]
    parts: list[str] = field(default_factory=list)
    taken_apart: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in self.model.named_modules()}
        self._inside: dict[str, list[str]] = {}
        parents = {made.name: made.parent for made in reversed(self.calls)}
        for name in dict.fromkeys(made.name for made in self.calls):
            self._inside.setdefault(parents[name], []).append(name)
        self._visit("")

    def _visit(self, name: str) -> None:
        self.taken_apart.append(name)
        for child in self._inside.get(name, []):
            if self._sizes[child] and child not in (*self.parts, *self.taken_apart):
                if self._is_divided(child):
                    self._visit(child)
                else:
                    self.parts.append(child)

    def _is_divided(self, name: str) -> bool:
        held = [child for child in self._inside.get(name, []) if self._sizes[child]]
        if self.starts:
            return bool(held) and any(start.startswith(f"{name}.") for start in self.starts)
        module = self.model.get_submodule(name)
        is_made_of_parts = isinstance(module, CONTAINERS) or not type(module).__module__.startswith("torch.nn.")
        return is_made_of_parts and len(held) > 1 and self._sizes[name] > LARGEST_SHARE * self._sizes[""]

    def check_order(self, scheme: str) -> None:
        """Raise UsageError where a name starts no part, or starts one before the name that stands before it."""
        reached = -1
        for name in self.starts:
            inside = [place for place, part in enumerate(self.parts) if part == name or part.startswith(f"{name}.")]
            if not inside:
                raise UsageError(f"blocks ({scheme}): {name} holds no parameter, or the forward pass does not call it")
            if inside[0] <= reached:
                raise UsageError(
                    f"blocks ({scheme}): {name} does not run after the name before it; list names in forward order, "
                    "which without example= is taken to be the order of definition"
                )
            reached = inside[0]

    def groups(self) -> list[tuple[str, list[str]]]:
        """Return each block's name and parts, in forward order; parts that are called again are in one block."""
        groups: list[tuple[str, list[str]]] = []
        opened: set[str] = set()
        for part in self.parts:
            name = next((s for s in self.starts if (part == s or part.startswith(f"{s}.")) and s not in opened), None)
            joins = isinstance(self.model.get_submodule(part), _BatchNorm)
            if not groups or name is not None or (not self.starts and not joins):
                opened |= {name} if name is not None else set()
                groups.append((name or part, []))
            groups[-1][1].append(part)
        return self._joined_where_called_again(groups)

    def _joined_where_called_again(self, groups: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        block_of = {part: block for block, (_, parts) in enumerate(groups) for part in parts}
        reached, last = 0, dict[int, int]()
        for made in self.calls:
            if made.name in block_of:
                reached = max(reached, block_of[made.name])
                last[block_of[made.name]] = reached
        joined: list[tuple[str, list[str]]] = []
        until = -1
        for block, (name, parts) in enumerate(groups):
            if joined and block <= until:
                joined[-1][1].extend(parts)
            else:
                joined.append((name, list(parts)))
            until = max(until, last.get(block, block))
        return joined
