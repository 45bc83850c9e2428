"""ruff over the notebooks' cells: those of the notebook's own process as one file, those of ``%%spmd`` as another."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks.pages import NOTEBOOKS, Cell, code

# A cell ends in an expression to be shown (B018), imports where it needs something (E402), may define a thing again (F811),
# and has a blank in front of which variables are not yet used (F841).
RULES = ["--select", "E,F,W,I,UP,B,C4,SIM,PIE,RET,NPY,PT", "--ignore", "E402,B018,F811,SIM108,I001,B023,PIE790,F841"]
ON_RANKS = ["rank", "world_size", "device", "torch", "dist", "display"]
LONGEST_CELL = 20


def lint(cells: list[Cell], on_ranks: bool) -> str:
    """What ruff says about these cells; "" if nothing."""
    names = ON_RANKS if on_ranks else ["pull", "push", "display", "get_ipython"]
    if on_ranks:
        pushed = re.findall(
            r"push\((.*?)\)$", "\n".join(cell.source for cell in cells if not cell.on_ranks), re.MULTILINE
        )
        names = names + [name for call in pushed for name in re.findall(r"(\w+)=", call)]
    source = "\n\n".join(f"# In [{cell.count}]\n{cell.python}" for cell in cells if cell.on_ranks == on_ranks) + "\n"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--line-length",
        "110",
        "--output-format",
        "concise",
    ]
    command += [*RULES, "--config", f"builtins = {names!r}", "--stdin-filename", "cells.py", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("on_ranks", [False, True], ids=["notebook", "ranks"])
def test_cells_are_clean(path: Path, on_ranks: bool) -> None:
    assert lint(code(path), on_ranks) == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short(path: Path) -> None:
    found = {cell.count: len(cell.source.splitlines()) for cell in code(path)}
    assert {count: lines for count, lines in found.items() if lines > LONGEST_CELL} == {}


def test_the_lint_looks_into_cells_on_ranks() -> None:
    def cells(*sources: str) -> list[Cell]:
        return [Cell("code", source) for source in sources]

    assert lint(cells("%%spmd --timeout 2\nx = torch.ones(rank)\n%env RANK\nx"), True) == ""
    assert "F821" in lint(cells("%%spmd\ny = missing"), True)
    assert "F821" in lint(cells("x = 1", "%%spmd\nx + 1"), True)  # a variable of the notebook is not one of the ranks
    assert lint(cells("push(x=1)", "%%spmd\nx + 1"), True) == ""
    assert "F821" in lint(cells("%%spmd\nx = 1", "x + 1"), False)
    assert "F401" in lint(cells("import os"), False)
    assert ast.parse(cells("%%spmd\n!ls\nx = 1")[0].python)
