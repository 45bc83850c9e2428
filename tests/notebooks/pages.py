"""The notebooks as data: their cells, their exercises, and how they are brought up to date.

Used by the tests beside this file and by ``python -m tests.notebooks``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

COURSE = [
    "00_start_here",
    "01_rank_groups",
    "02_f_and_g",
    "03_parallel_linears",
    "04_cross_entropy",
    "05_sequence_parallelism",
    "06_pipelines",
    "07_interleaved",
    "08_pipedream",
    "09_zero_bubble",
    "10_write_your_own_schedule",
    "11_recomputation",
    "12_data_parallelism",
    "13_all_together",
]

MAGIC = re.compile(r"^(\s*)([%!].*)$", re.MULTILINE)
SOLUTION = re.compile(r"<summary>Solution.*?</summary>\s*```python\n(.*?)```", re.DOTALL)


@dataclass
class Cell:
    """One cell. ``outputs`` as Jupyter stores them, each with its text joined."""

    kind: str  # "code" or "markdown"
    source: str
    tags: list[str] = field(default_factory=list)
    count: int | None = None
    outputs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def on_ranks(self) -> bool:
        return self.source.startswith("%%spmd")

    @property
    def python(self) -> str:
        """The source with magics put out of action, so that lines keep their numbers."""
        return MAGIC.sub(r"\1pass  # \2", self.source)

    @property
    def printed(self) -> str:
        """Everything that its outputs hold as text."""
        parts = []
        for output in self.outputs:
            parts.append("".join(output.get("text", "")))
            parts += ["".join(data) for kind, data in output.get("data", {}).items() if isinstance(data, (str, list))]
            parts.append("\n".join(output.get("traceback", [])))
        return "\n".join(filter(None, parts))

    def calls(self, *names: str) -> bool:
        return any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
            for node in ast.walk(ast.parse(self.python))
        )


def read(path: Path) -> list[Cell]:
    page = json.loads(path.read_text(encoding="utf-8"))
    return [
        Cell(
            cell["cell_type"],
            "".join(cell["source"]),
            cell["metadata"].get("tags", []),
            cell.get("execution_count"),
            cell.get("outputs", []),
        )
        for cell in page["cells"]
    ]


def code(path: Path) -> list[Cell]:
    return [cell for cell in read(path) if cell.kind == "code"]


# ---- exercises -----------------------------------------------------------------------------------------------------------------


@dataclass
class Exercise:
    """A cell with a blank, and the solution folded beneath it."""

    cell: Cell
    solution: str

    @property
    def name(self) -> str:
        (call,) = [
            node
            for node in ast.walk(ast.parse(self.cell.python))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exercise"
        ]
        return str(ast.literal_eval(call.args[0]))

    def filled(self, solution: str | None = None) -> str:
        """The cell with each definition that has a blank replaced by the solution's of the same name."""
        solutions = definitions(self.solution if solution is None else solution)
        lines = self.cell.source.split("\n")
        for name, (first, last) in reversed(positions(self.cell.python).items()):
            if "..." in "\n".join(lines[first:last]):
                lines[first:last] = solutions.pop(name).split("\n")
        if solutions:
            raise ValueError(f"{self.name}: the solution defines {sorted(solutions)}, which have no blank")
        return "\n".join(lines)

    def mutants(self) -> Iterator[str]:
        """The solution with one small change: another operator, a number one larger, one name for another."""
        for number in range(1000):
            change = _Mutation(number)
            tree = change.visit(ast.parse(self.solution))
            if not change.done:
                return
            yield self.filled(ast.unparse(tree))


def exercises(path: Path) -> list[Exercise]:
    cells, found = read(path), []
    for cell, beneath in zip(cells, [*cells[1:], Cell("markdown", "")], strict=True):
        if cell.kind == "code" and cell.calls("exercise"):
            solution = SOLUTION.search(beneath.source) if beneath.kind == "markdown" else None
            assert solution, f"{path.name}: no folded solution beneath the cell\n{cell.source}"
            found.append(Exercise(cell, solution[1].rstrip()))
    return found


def positions(python: str) -> dict[str, tuple[int, int]]:
    """Name of each definition or variable at the top level -> (first line, line after the last), counted from 0."""
    found = {}
    for node in ast.parse(python).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = first - 1, node.end_lineno or 0
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = node.lineno - 1, node.end_lineno or 0
    return found


def definitions(python: str) -> dict[str, str]:
    lines = python.split("\n")
    return {name: "\n".join(lines[first:last]) for name, (first, last) in positions(python).items()}


_SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
          ast.Mod: ast.FloorDiv, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq}  # fmt: skip


class _Mutation(ast.NodeTransformer):
    """Changes the n-th place that can be changed."""

    def __init__(self, number: int) -> None:
        self.left, self.done = number, False

    def _chosen(self) -> bool:
        self.left -= 1
        self.done = self.done or self.left == -1
        return self.left == -1

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in _SWAPS and self._chosen():
            node.op = _SWAPS[type(node.op)]()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if type(node.ops[0]) in _SWAPS and self._chosen():
            node.ops[0] = _SWAPS[type(node.ops[0])]()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, int | float) and self._chosen():
            return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
        if isinstance(node.value, str) and node.value and self._chosen():
            return ast.Constant(node.value[::-1])
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None and self._chosen():
            return ast.Return(ast.Constant(None))
        return node


# ---- bringing a notebook up to date --------------------------------------------------------------------------------------------

WIDGET = "application/vnd.jupyter.widget-view+json"
BADGES = re.compile(r"^\[!\[.*$", re.MULTILINE)
ADDRESS = re.compile(r"git\+https://github\.com/[^\s\"']+")
INSTALL = """\
# On Colab, Kaggle or Binder this fetches minimeg; where it is installed it does nothing.
import importlib.util

if importlib.util.find_spec("minimeg") is None:
    %pip install -q "minimeg @ git+https://github.com/{repository}\""""


def badges(repository: str, name: str) -> str:
    """One line of markdown: open this notebook on Colab, Kaggle or Binder. ``repository``: "account/name" on GitHub."""
    at = f"github.com/{repository}"
    links = {
        "Colab": f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src=https://{at}/blob/main/notebooks/{name}",
        "Binder": f"https://mybinder.org/v2/gh/{repository}/main?labpath=notebooks/{name}",
    }
    shield = "https://img.shields.io/badge/open_on-{}-0072B2"
    return " ".join(f"[![open on {site}]({shield.format(site)})]({link})" for site, link in links.items())


def readdress(page: Any, repository: str, name: str) -> None:
    """Write the repository's address into the badges and the install cell."""
    for cell in page.cells[:3]:
        cell.source = BADGES.sub(badges(repository, name), cell.source)
        cell.source = ADDRESS.sub(f"git+https://github.com/{repository}", cell.source)


def tidy(page: Any) -> None:
    """Leave nothing in a notebook that differs from machine to machine or from run to run."""
    page.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in page.cells:
        cell.metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        if cell.cell_type != "code":
            continue
        merged: list[Any] = []
        for output in cell.outputs:
            if merged and output.output_type == "stream" == merged[-1].output_type and output.name == merged[-1].name:
                merged[-1].text += output.text
            else:
                merged.append(output)
        for output in merged:
            if "metadata" in output:
                output.metadata = {}
            output.get("data", {}).pop(WIDGET, None)  # its id is random, and only a running kernel can show it
        cell.outputs = merged


def run(path: Path, repository: str, timeout: int = 120) -> None:
    """Execute a notebook from top to bottom and store its outputs in it."""
    import nbformat
    from nbclient import NotebookClient

    page = nbformat.read(path, as_version=4)
    readdress(page, repository, path.name)
    client = NotebookClient(
        page,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
    )
    client.execute()
    tidy(page)
    nbformat.validate(page)
    nbformat.write(page, path)
