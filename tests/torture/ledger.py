"""The results of torture: one line per round in rounds.jsonl, from which a stopped torture continues, and README.md."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAULTS = ("corrupt", "orphans", "hang", "ended by itself", "wrong resume", "silent", "traceback")
"""What must not be, in this order in the table: state that is lost or refused, processes that are left, a job that does
not end, a run that goes on otherwise, damage that nobody notices, an end that the user cannot read."""


class Ledger:
    """The rounds so far, of any kind, those of earlier starts too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._file = folder, folder / "rounds.jsonl"
        self.rounds: list[dict[str, Any]] = []
        if self._file.exists():
            # The last line may have been cut off.
            lines = self._file.read_text(encoding="utf-8").split("\n")[:-1]
            self.rounds = [json.loads(line) for line in lines]
            self._file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def add(self, kind: str, *, seconds: float, faults: list[str], **what: Any) -> None:
        """Write down a round."""
        entry = {"kind": kind, "number": self.count(kind), "seconds": round(seconds, 2), "faults": faults, **what}
        self.rounds.append(entry)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def count(self, kind: str) -> int:
        """Return how many rounds of a kind there are."""
        return sum(entry["kind"] == kind for entry in self.rounds)

    def faults(self) -> Counter[str]:
        """Return how often each fault was found."""
        return Counter(fault for entry in self.rounds for fault in entry["faults"])

    def table(self) -> Iterator[str]:
        """Yield the lines of a table of rounds and faults, by kind."""
        yield f"| kind | rounds | a minute | {' | '.join(FAULTS)} |"
        yield f"|---|---:|---:|{'---:|' * len(FAULTS)}"
        for kind in dict.fromkeys(entry["kind"] for entry in self.rounds):
            mine = [entry for entry in self.rounds if entry["kind"] == kind]
            found = Counter(fault for entry in mine for fault in entry["faults"])
            minutes = max(1e-9, sum(entry["seconds"] for entry in mine) / 60)
            counts = " | ".join(str(found[fault]) for fault in FAULTS)
            yield f"| {kind} | {len(mine)} | {len(mine) / minutes:.1f} | {counts} |"

    def ends(self) -> Iterator[str]:
        """Yield the lines of a table of how long jobs took to end, by signal and receiver."""
        yield "| signal | to | rounds | median s | longest s | exit codes |"
        yield "|---|---|---:|---:|---:|---|"
        kills = [entry for entry in self.rounds if entry["kind"] == "kill"]
        for signal, to in sorted({(entry["signal"], entry["to"]) for entry in kills}):
            mine = [entry for entry in kills if (entry["signal"], entry["to"]) == (signal, to)]
            took = [entry["ended_after"] for entry in mine]
            codes = ", ".join(f"{code} ({n}x)" for code, n in sorted(Counter(str(e["code"]) for e in mine).items()))
            yield f"| {signal} | {to} | {len(mine)} | {statistics.median(took):.1f} | {max(took):.1f} | {codes} |"

    def write_up(self, **provenance: str) -> None:
        """Write README.md."""
        lines = [
            "# Torture",
            "",
            "`make torture`: rounds of random faults on the real program, and what was found.",
            "",
        ]
        lines += [*self.table(), ""]
        if any(entry["kind"] == "kill" for entry in self.rounds):
            lines += ["From the signal to the end of the launcher, on a machine that may have done other work:", ""]
            lines += [*self.ends(), ""]
        lines += [f"- {name}: {value}" for name, value in provenance.items()]
        bad = [entry for entry in self.rounds if entry["faults"]]
        lines += [f"- {json.dumps(entry)}" for entry in bad]
        (self.folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
