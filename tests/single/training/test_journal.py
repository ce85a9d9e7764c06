"""A recipe that is called again gets what its verbs returned; another recipe is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hvfreeze.errors import RefusedError
from hvfreeze.training.journal import Journal


def recorded() -> dict[str, Any]:
    """The state of a journal with one verb that has ended, and one under way."""
    journal = Journal({"recipe": "auto", "epochs": 4})
    assert journal.recall("probe", {}) is None and not journal.begin("probe", {})
    journal.end(0.5, [1.0])
    assert journal.recall("tune", {"steps": 3}) is None and not journal.begin("tune", {"steps": 3})
    return journal.state_dict()


def resumed() -> Journal:
    journal = Journal({"recipe": "auto", "epochs": 4})
    journal.load_state_dict(recorded(), source="step-3.pt")
    return journal


def test_a_verb_that_has_ended_is_recalled_and_the_one_under_way_continues() -> None:
    journal = resumed()
    entry = journal.recall("probe", {})
    assert entry is not None and (entry.value, entry.budget) == (0.5, [1.0])
    assert journal.recall("tune", {"steps": 3}) is None
    assert journal.begin("tune", {"steps": 3}), "it goes on from its own state"
    journal.end(None, [])
    assert not journal.begin("solve", {}), "what comes next is new"
    assert journal.has_ended("tune") is False
    journal.end(1, [])
    assert journal.has_ended("solve")


def test_other_verbs_and_other_arguments_are_refused_by_name() -> None:
    with pytest.raises(
        RefusedError,
        match=r"checkpoint step-3.pt belongs to a run with other settings \('probe' before, 'solve' now",
    ):
        resumed().recall("solve", {})
    with pytest.raises(RefusedError, match=r"probe: pool: None before, 2 now"):
        resumed().recall("probe", {"pool": 2})
    journal = resumed()
    journal.recall("probe", {})
    with pytest.raises(RefusedError, match=r"tune: steps: 3 before, 4 now"):
        journal.begin("tune", {"steps": 4})


def test_a_checkpoint_of_another_recipe_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="'plain' before, 'auto' now"):
        Journal({"recipe": "auto", "epochs": 4}).check_recipe({"recipe": {"recipe": "plain"}}, source="step-3.pt")


def test_a_last_verb_that_is_to_be_longer_is_opened_again() -> None:
    journal = Journal({"recipe": "plain"})
    journal.begin("tune", {})
    journal.end({"epochs": 1}, [])
    again = Journal({"recipe": "plain"})
    again.load_state_dict(journal.state_dict(), source="step-3.pt")
    assert again.at_last
    again.reopen()
    assert again.recall("tune", {}) is None and again.begin("tune", {})
