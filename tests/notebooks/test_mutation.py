"""nbval notices a changed digit: in the output of a plain cell, and in that of a ``%%spmd`` cell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.pages import NOTEBOOKS, ROOT

Page = dict[str, Any]


def shortest() -> Page:
    """Of all notebooks, cut off after the first cells of either kind that print a number, the one with the fewest cells."""
    found = [cut for path in NOTEBOOKS if (cut := cut_off(json.loads(path.read_text(encoding="utf-8")))) is not None]
    return min(found, key=lambda page: len(page["cells"]))


def cut_off(page: Page) -> Page | None:
    kinds = set()
    for index, cell in enumerate(page["cells"]):
        if cell["cell_type"] == "code" and digit_in(cell) is not None:
            kinds.add(cell["source"][0].startswith("%%spmd"))
        if len(kinds) == 2:
            return page | {"cells": page["cells"][: index + 1]}
    return None


def digit_in(cell: Page) -> tuple[list[str], int] | None:
    """(the lines of an output, the first of them in which a digit stands apart from names and labels)."""
    for output in cell["outputs"]:
        lines = output.get("text", output.get("data", {}).get("text/plain", []))
        for number, line in enumerate(lines):
            if re.search(r"(?<![\w-])\d+(?![\w\]-])", line):
                return lines, number
    return None


def failures(page: Page, folder: Path) -> list[int]:
    """Numbers of the cells that nbval rejects."""
    path = folder / "mutated.ipynb"
    path.write_text(json.dumps(page), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", "-rf", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert re.search(r"\d+ (passed|failed)", done.stdout), done.stdout + done.stderr
    return sorted({int(number) for number in re.findall(r"^FAILED .*::Cell (\d+)", done.stdout, re.MULTILINE)})


@pytest.mark.skipif(not NOTEBOOKS, reason="there are no notebooks yet")
def test_a_changed_digit_fails(tmp_path: Path) -> None:
    page = shortest()
    assert failures(page, tmp_path) == []
    cells = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    changed = []
    for wanted in ("ranks", "notebook"):
        for number, cell in enumerate(cells):
            kind = "ranks" if cell["source"][0].startswith("%%spmd") else "notebook"
            if kind == wanted and (place := digit_in(cell)) is not None:
                lines, line = place
                lines[line] = re.sub(
                    r"(?<![\w-])\d+(?![\w\]-])",
                    lambda m: m[0][:-1] + str((int(m[0][-1]) + 1) % 10),
                    lines[line],
                    count=1,
                )
                changed.append(number)
                break
    assert len(changed) == 2
    assert failures(page, tmp_path) == sorted(changed)
