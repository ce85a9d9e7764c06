"""Writes the API reference, one page from the docstrings of all public names: `make docs`, into build/docs.

Names of hvfreeze are loaded on first use, so that they are put into the module before pdoc looks at it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hvfreeze


def write(target: Path) -> Path:
    """Write the page and what it needs into `target`; return the page."""
    import pdoc

    for name in hvfreeze.__all__:
        setattr(hvfreeze, name, getattr(hvfreeze, name))
    pdoc.render.configure(docformat="google", show_source=False, search=False)
    pdoc.pdoc("hvfreeze", "!hvfreeze[.]", output_directory=target)
    return target / "hvfreeze.html"


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
