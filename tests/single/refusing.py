"""A refused program: one message that names the error, and an exit code."""

from __future__ import annotations

from tests.program import Outcome

SMALL = ["--model", "mlp-16x16", "--train-samples", "96", "--batch-size", "16"]
SMALL += ["--threads", "1", "--epochs", "1"]


def refused(outcome: Outcome, code: int, *fragments: str) -> None:
    assert outcome.returncode == code, str(outcome)
    assert len(outcome.messages) == 1, str(outcome)
    assert "Traceback" not in outcome.stdout + outcome.stderr, str(outcome)
    assert outcome.stderr.splitlines()[-1].endswith(outcome.messages[0]), f"more was said after the message\n{outcome}"
    missing = [fragment for fragment in fragments if fragment not in outcome.messages[0]]
    assert not missing, f"{missing} not in the message\n{outcome}"
