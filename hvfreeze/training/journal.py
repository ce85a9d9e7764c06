"""The journal of a run: the verbs that have ended, and what they returned.

A recipe is ordinary code. To resume a run it is called again from the top: verbs that ended before the checkpoint
return the recorded value at once, the verb that was under way continues from its own state. So a recipe must decide by
nothing but the values of its verbs. Equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hvfreeze.errors import RefusedError

Arguments = dict[str, Any]
"""Plain values by name."""


@dataclass(frozen=True)
class Entry:
    """A verb that has ended."""

    verb: str
    arguments: Arguments
    value: Any
    """What it returned, as plain values."""
    budget: Any
    """What was left of the budget when it ended, as `Budget.mark` returns it."""


@dataclass
class Journal:
    """The verbs of a run in order."""

    recipe: Arguments
    """The recipe's name, and the settings that it decides by."""
    ended: list[Entry] = field(default_factory=list)
    open: tuple[str, Arguments] | None = None
    """The verb under way."""
    _recalled: int = 0
    _source: str = ""

    def recall(self, verb: str, arguments: Arguments) -> Entry | None:
        """Return the record of the recipe's next verb, None where it is yet to be made.

        Raises:
            RefusedError: another verb stands there, or other arguments.
        """
        if self._recalled == len(self.ended):
            return None
        entry = self.ended[self._recalled]
        self._check((entry.verb, entry.arguments), (verb, arguments))
        self._recalled += 1
        return entry

    def begin(self, verb: str, arguments: Arguments) -> bool:
        """Note that a verb is under way; return whether it was under way at the checkpoint that the run resumes from.

        Raises:
            RefusedError: another verb was under way, or other arguments.
        """
        continues = self.open is not None
        if self.open is not None:
            self._check(self.open, (verb, arguments))
        self.open = (verb, arguments)
        return continues

    def end(self, value: Any, budget: Any) -> None:
        """Record what the verb under way has returned."""
        assert self.open is not None, "no verb is under way"
        self.ended.append(Entry(*self.open, value, budget))
        self._recalled, self.open = len(self.ended), None

    def reopen(self) -> None:
        """Continue the last verb, which had ended: it is to be longer."""
        last = self.ended.pop()
        self.open, self._recalled = (last.verb, last.arguments), len(self.ended)

    @property
    def at_last(self) -> bool:
        """Whether the next record is the last one, with nothing under way behind it."""
        return self._recalled == len(self.ended) - 1 and self.open is None

    def has_ended(self, verb: str) -> bool:
        """Tell whether this verb was the last, and has ended."""
        return self.open is None and bool(self.ended) and self.ended[-1].verb == verb

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"recipe": self.recipe, "ended": [asdict(entry) for entry in self.ended], "open": self.open}

    def load_state_dict(self, state: Mapping[str, Any], *, source: str) -> None:
        """Continue from the state in the checkpoint `source`; verbs are recalled from the first one on."""
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
        listed = "; ".join(f"{key}: {given.get(key)!r} there, {arguments.get(key)!r} here" for key in differing)
        what = f"'{verb}' there, '{name}' here" if verb != name else f"{verb}: {listed}"
        raise RefusedError(
            f"the checkpoint {self._source} is of another course ({what}); give the settings that it began with, or "
            "start from scratch in another --run-dir"
        )
