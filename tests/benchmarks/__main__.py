"""Run the benchmarks: ``make bench``, or ``python -m tests.benchmarks [SECTION ...] [--rounds N] [--json FILE]``.

Prints each row as it comes, then the verdicts in one table; writes the JSON from which the site's page is made. Sections that are
not run keep their rows in the file. The whole takes about six minutes on two cores; other work on the machine makes the times
worthless.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from minimeg.lab.ranks import Ranks
from tests.benchmarks import compute, data_parallel, prediction, recomputation, sleeping, tensor_parallel, whole_step
from tests.benchmarks.table import Row, as_json, lines, verdicts

Pool = Callable[[int], Ranks]
# By name: the rows, and how many rounds of --rounds' standard 10.
SECTIONS: dict[str, tuple[Callable[[int, Pool], Iterator[Row]], float]] = {
    "sleeping": (sleeping.rows, 1),
    "compute": (compute.rows, 1),
    "tensor-parallel": (tensor_parallel.rows, 1.5),
    "recomputation": (recomputation.rows, 1.5),
    "data-parallel": (data_parallel.rows, 1.5),
    "whole-step": (whole_step.rows, 1.5),
    "prediction": (prediction.rows, 1),
}
TARGET = Path(__file__).parents[2] / "docs" / "benchmarks.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure minimeg against others.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--rounds", type=int, default=10, help="of each row (default 10)")
    parser.add_argument("--json", type=Path, default=TARGET, help="the file to write (default docs/benchmarks.json)")
    options = parser.parse_args()
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown or options.rounds < 1:
        parser.error(f"sections are {', '.join(SECTIONS)}, got {unknown}" if unknown else "--rounds must be at least 1")
    report = json.loads(options.json.read_text()) if options.json.exists() else {"sections": {}}
    report |= {"machine": machine()}
    chosen = options.sections or list(SECTIONS)
    every: list[Row] = []
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools:
            pools[size] = Ranks(size, device="cpu", threads=1)
        return pools[size]

    try:
        for name in chosen:
            measure, share = SECTIONS[name]
            start, before = time.monotonic(), os.getloadavg()[0]
            print(f"\n== {name} (load average {before:.1f})", flush=True)
            rows = []
            for row in measure(max(1, round(options.rounds * share)), pool):
                rows.append(row)
                print("\n".join(lines(row)), flush=True)
            for idle in pools.values():
                idle.close()  # waiting processes are few, but their threads are many
            seconds = time.monotonic() - start
            print(f"== {name}: {seconds:.0f} s, load average {os.getloadavg()[0]:.1f}", flush=True)
            # The load before; what the benchmark itself adds is no disturbance.
            report["sections"][name] = {
                "load": round(before, 2),
                "seconds": round(seconds),
                "rows": [as_json(row) for row in rows],
            }
            every += rows
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        for held in pools.values():
            held.close()
    print("\n" + "\n".join(verdicts(every)))
    print(f"\nwritten to {options.json}")
    return 0


def machine() -> dict[str, Any]:
    """What the numbers were measured on; nothing that names the machine."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
        "threads a rank": 1,
    }


if __name__ == "__main__":
    sys.exit(main())
