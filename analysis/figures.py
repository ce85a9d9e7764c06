"""Draws all figures from the kept runs, and writes the pages and the generated parts of the guides.

python -m analysis.figures                  in analysis/results, README.md and docs/
python -m analysis.figures --out DIR        the figures alone, as DIR/NAME/figures/*.svg; nothing is written elsewhere
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from analysis import summary
from analysis.experiments import PAGES
from analysis.sweeps.kept import RESULTS
from analysis.sweeps.options import folder_to_write


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what there are results of; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.figures", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=folder_to_write, help="write figures here, and nothing anywhere else")
    options = parser.parse_args(arguments)
    for name, page in PAGES.items():
        drawn = page.draw(RESULTS, (options.out or RESULTS) / name)
        print(f"{name}: {len(drawn)} figures in {(options.out or RESULTS) / name}")
    return summary.main([]) if options.out is None else 0


if __name__ == "__main__":
    sys.exit(main())
