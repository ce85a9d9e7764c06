"""How many rows a second the cache's reader gives, as `analysis.cache_reads` has timed it, for a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.sweeps.kept import texts_of
from analysis.sweeps.statistics import Interval, mean_interval, shown
from hvfreeze.report.tables import Table, percent
from hvfreeze.wording import plural

READS = "reads.csv"


@dataclass(frozen=True)
class Reads:
    """The rows of `analysis.cache_reads`, as texts: ranks, row_bytes, state, repeat, rows_per_second, resident."""

    rows: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, directory: Path) -> Reads:
        """Return those in an experiment's folder."""
        return cls(tuple(texts_of(directory / READS)))

    def cases(self) -> list[tuple[str, str]]:
        """Return bytes of a row and ranks, in the order of the rows."""
        return list(dict.fromkeys((row["row_bytes"], row["ranks"]) for row in self.rows))

    def rate(self, row_bytes: str, ranks: str, state: str) -> Interval:
        """Return the rows a second of all ranks together, over the repetitions."""
        wanted = {"row_bytes": row_bytes, "ranks": ranks, "state": state}
        return mean_interval([float(row["rows_per_second"]) for row in self.rows if wanted.items() <= row.items()])

    def count(self) -> int:
        """Return the fewest repetitions of a case."""
        return min(self.rate(*case, state).n for case in self.cases() for state in ("cold", "warm"))

    def claim(self) -> str:
        """Return the rate of one case: the largest rows on the fewest ranks, cold."""
        row_bytes, ranks = max(self.cases(), key=lambda case: (int(case[0]), -int(case[1])))
        rate = shown(self.rate(row_bytes, ranks, "cold"), thousands, count=True)
        by = plural(int(ranks), "rank")
        return f"{rate} thousand rows of {int(row_bytes) // 1024} KB a second, by {by} from a cold page cache."

    def text(self) -> str:
        """Return rows a second by ranks, from a cold and from a warm page cache."""
        told = []
        for row_bytes in dict.fromkeys(row_bytes for row_bytes, _ in self.cases()):
            cells = [
                f"{ranks} {'rank' if ranks == '1' else 'ranks'} {thousands(self.rate(row_bytes, ranks, 'cold').mean)} "
                f"and {thousands(self.rate(row_bytes, ranks, 'warm').mean)}"
                for each, ranks in self.cases()
                if each == row_bytes
            ]
            told.append(f"of {int(row_bytes) // 1024} KB: {', '.join(cells)}")
        return f"Thousand rows a second of all ranks, cold and warm: {'; '.join(told)}."

    def table(self) -> Table:
        """Return the rates with their intervals, and what lay in the page cache before."""
        rows = []
        for row_bytes, ranks in self.cases():
            rates = [self.rate(row_bytes, ranks, state) for state in ("cold", "warm")]
            mine = [row for row in self.rows if (row["row_bytes"], row["ranks"]) == (row_bytes, ranks)]
            left = max(float(row["resident"]) for row in mine if row["state"] == "cold")
            told = (shown(rates[0], thousands), shown(rates[1], thousands, count=True))
            per_second = (f"{rate.mean * int(row_bytes) / 1e6:.0f}" for rate in rates)
            rows.append((f"{int(row_bytes) // 1024} KB", ranks, *told, *per_second, percent(left)))
        columns = ("Row", "Ranks", "Cold (1000 rows/s)", "Warm (1000 rows/s)", "Cold (MB/s)", "Warm (MB/s)")
        title = "Shuffled batches of 128 rows, all ranks together, each its own file (`python -m analysis.cache_reads`)"
        return Table(title=title, columns=(*columns, "Still in memory before cold reads"), rows=tuple(rows))


def thousands(rate: float) -> str:
    """Return a rate in thousands."""
    return f"{rate / 1e3:.0f}" if rate >= 1e5 else f"{rate / 1e3:.3g}"
