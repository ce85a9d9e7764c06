"""The journal of a run: the finished verbs and their results.

A recipe is ordinary code. A resumed run calls it again from the top: verbs that ended before the checkpoint return
their recorded value at once, and the interrupted verb continues from its state. So a recipe must decide only by its
settings and the values of its verbs. The journal is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hvfreeze.errors import RefusedError

Arguments = dict[str, Any]
"""Arguments of a verb or recipe: plain values by name."""


@dataclass(frozen=True)
class Entry:
    """A finished verb."""

    verb: str
    arguments: Arguments
    value: Any
    """Result of the verb, as plain values."""
    budget: Any
    """Budget at the end of the verb, from `Budget.mark`."""


@dataclass
class Journal:
    """The verbs of a run, in order."""

    recipe: Arguments
    """Name of the recipe and the settings that it depends on."""
    ended: list[Entry] = field(default_factory=list)
    open: tuple[str, Arguments] | None = None
    """The current verb."""
    _recalled: int = 0
    _source: str = ""

    def recall(self, verb: str, arguments: Arguments) -> Entry | None:
        """Return the record of the recipe's next verb; None if it has not run yet.

        Raises:
            RefusedError: the record has another verb or other arguments.
        """
        if self._recalled == len(self.ended):
            return None
        entry = self.ended[self._recalled]
        self._check((entry.verb, entry.arguments), (verb, arguments))
        self._recalled += 1
        return entry

    def begin(self, verb: str, arguments: Arguments) -> bool:
        """Record the start of a verb; return True if the checkpoint was written during this verb.

        Raises:
            RefusedError: the checkpoint has another verb or other arguments.
        """
        continues = self.open is not None
        if self.open is not None:
            self._check(self.open, (verb, arguments))
        self.open = (verb, arguments)
        return continues

    def end(self, value: Any, budget: Any) -> None:
        """Record the result of the current verb."""
        assert self.open is not None, "no verb has begun"
        self.ended.append(Entry(*self.open, value, budget))
        self._recalled, self.open = len(self.ended), None

    def reopen(self) -> None:
        """Reopen the last verb to make it longer."""
        last = self.ended.pop()
        self.open, self._recalled = (last.verb, last.arguments), len(self.ended)

    @property
    def at_last(self) -> bool:
        """Whether the next record is the last one and no verb is interrupted."""
        return self._recalled == len(self.ended) - 1 and self.open is None

    def has_ended(self, verb: str) -> bool:
        """Return True if this verb was the last and has ended."""
        return self.open is None and bool(self.ended) and self.ended[-1].verb == verb

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"recipe": self.recipe, "ended": [asdict(entry) for entry in self.ended], "open": self.open}

    def load_state_dict(self, state: Mapping[str, Any], *, source: str) -> None:
        """Load the state of the checkpoint `source` and recall verbs from the first one."""
        self.ended = [Entry(**entry) for entry in state["ended"]]
        self.open, self._recalled, self._source = state["open"] and tuple(state["open"]), 0, source

    def check_recipe(self, state: Any, *, source: str) -> None:
        """Raise RefusedError unless `state` is that of a journal of this recipe."""
        if not isinstance(state, Mapping) or not isinstance(state.get("recipe"), Mapping):
            raise RefusedError(
                f"the checkpoint {source} has no journal: an earlier version of hvfreeze wrote it; resume with that "
                "version, or start from scratch in another --run-dir"
            )
        self._source = source
        there = {key: value for key, value in state["recipe"].items() if key != "recipe"}
        here = {key: value for key, value in self.recipe.items() if key != "recipe"}
        self._check((str(state["recipe"].get("recipe")), there), (self.recipe["recipe"], here))

    def _check(self, there: tuple[str, Arguments], here: tuple[str, Arguments]) -> None:
        if there == here:
            return
        (verb, given), (name, arguments) = there, here
        differing = [key for key in {**given, **arguments} if given.get(key) != arguments.get(key)]
        listed = "; ".join(f"{key}: {given.get(key)!r} before, {arguments.get(key)!r} now" for key in differing)
        what = f"'{verb}' before, '{name}' now" if verb != name else f"{verb}: {listed}"
        raise RefusedError(
            f"the checkpoint {self._source} belongs to a run with other settings ({what}); use the "
            f"settings of that run, or start from scratch in another --run-dir"
        )
