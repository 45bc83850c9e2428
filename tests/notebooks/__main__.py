"""Run the notebooks and store their outputs: ``python -m tests.notebooks ACCOUNT/NAME [NOTEBOOK ...]``, or ``make notebooks``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.notebooks.pages import NOTEBOOKS, run

if __name__ == "__main__":
    repository, *chosen = sys.argv[1:]
    for path in map(Path, chosen or NOTEBOOKS):
        start = time.monotonic()
        run(path.resolve(), repository)
        print(f"{path.name:<36} {time.monotonic() - start:5.1f} s")
