"""Break the code behind the notebooks, one place at a time, and see which checks fail.

A check that no mutation makes fail proves nothing. For each notebook: first mutations of the package (``PACKAGE`` below), in a copy
of it; then, for the checks that still stand, mutations of the notebook's own cells (every number in a cell one larger).

Minutes a notebook, so not part of ``make test``: ``python -m tests.notebooks.mutate [NOTEBOOK ...]``.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

from tests.notebooks.pages import MAGIC, NOTEBOOKS, ROOT

# (file, what stands there, what is put in its place)
PACKAGE = [
    ("comm.py", "lambda: buffer.to(x.device)", "lambda: 2 * buffer.to(x.device)"),
    ("comm.py", "return torch.cat(tuple(gathered), dim)", "return 3 * torch.cat(tuple(gathered), dim)"),
    ("comm.py", "received.sum(0, dtype=x.dtype)", "received[0]"),
    ("ledger.py", '(2 if op == "all_reduce" else 1)', "3"),
    ("ledger.py", "for book in self.ledgers:", "for book in 2 * self.ledgers:"),
    ("grid.py", "stride *= sizes[axis]", "stride += sizes[axis]"),
    ("grid.py", "[[first + offset for offset in offsets] for first in self._count(outside)]",
     "[[first + offset for first in self._count(outside)] for offset in offsets]"),
    ("grid.py", "[pipeline[0], pipeline[-1]] if self.pp > 1", "[pipeline[0], pipeline[1]] if self.pp > 1"),
    ("mappings.py", "return _map(x, group, _identity, _all_reduce)", "return x"),
    ("mappings.py", "return _map(x, group, _all_reduce, _identity)", "return _map(x, group, _all_reduce, _all_reduce)"),
    ("mappings.py", "if tensor_parallel_output_grad else", "if not tensor_parallel_output_grad else"),
    ("linear.py", "dx = dy.matmul(weight)", "dx = 2 * dy.matmul(weight)"),
    ("linear.py", "return _rows(dy).t().matmul(_rows(whole))", "return 2 * _rows(dy).t().matmul(_rows(whole))"),
    ("layers.py", "return z if self.bias is None else z + self.bias", "return z"),
    ("layers.py", ".masked_fill(elsewhere.unsqueeze(-1), 0)", ""),
    ("layers.py", "partial = sequence_parallel and group.size > 1", "partial = False"),
    ("cross_entropy.py", "log_sum = sum_exp.log()", "log_sum = sum_exp.log() + 0.5"),
    ("cross_entropy.py", "z[..., real:] = -torch.inf", "pass"),
    ("cross_entropy.py", "dz = softmax.clone()", "dz = 2 * softmax.clone()"),
    ("memory.py", "sign * saved.nbytes", "2 * sign * saved.nbytes"),
    ("cost/communication.py", "return total * shape.sequence", "return 2 * total * shape.sequence"),
    ("cost/communication.py", "return 2 * microbatches * chunks", "return 3 * microbatches * chunks"),
    ("cost/activations.py", "sbh = shape.sequence * microbatch", "sbh = 2 * shape.sequence * microbatch"),
    ("data_parallel.py", "if bucket.partial:", "if False:"),
    ("models/transformer.py", "return x + self._dropout(plan", "return 2 * x + self._dropout(plan"),
    ("optimizer.py", "self.update.step()", "pass"),
    ("schedule/orders.py", "warmup = min(stages - rank - 1, microbatches)", "warmup = min(stages - rank, microbatches)"),
    ("schedule/orders.py", '+ actions("B", range(microbatches))', '+ actions("B", reversed(range(microbatches)))'),
    ("schedule/orders.py", "min(2 * (stages - rank - 1) +", "min(stages - rank - 1 +"),
    ("schedule/dependencies.py", "clock += costs[number % stride // m]", "clock += 1 + costs[number % stride // m]"),
    ("schedule/timeline.py", "(max(self.stage_spans) - ideal) / ideal", "(max(self.stage_spans) - ideal) / (ideal + 1)"),
    ("schedule/timeline.py", "peak = max(peak, held)", "peak = max(peak, held + 1)"),
    ("schedule/messages.py", "yield Send(transfers[place])", "yield from [Send(transfers[place])] * 2"),
    ("schedule/messages.py", "at[slot].append(place)", "at[slot].insert(0, place)"),
    ("pipeline/executor.py", "self.actions.append(action)", "self.actions.insert(0, action)"),
    ("pipeline/executor.py", "max(self.peak_in_flight, len(self.in_flight))", "max(self.peak_in_flight, 5)"),
    ("pipeline/executor.py", "/ self.normaliser", "/ self.normaliser**2"),
    ("pipeline/recorder.py", "Span(action, start, self._now())", "Span(action, start - 1, self._now())"),
    ("pipeline/recorder.py", "for row in rows\n        )", "for row in rows[::-1]\n        )"),
    ("trainer.py", "number(self.state.dp_cp.all_reduce(share))", "number(share)"),
    ("data_parallel.py", "total = self.state.embedding.all_reduce(copies[0])", "total = copies[0]"),
]  # fmt: skip


def prepared(folder: Path) -> Path:
    """A copy of the package in which a failed check is written down and the cell goes on, and in which hangs are cut early."""
    shutil.copytree(ROOT / "minimeg", folder / "minimeg", ignore=shutil.ignore_patterns("__pycache__"))
    checks = folder / "minimeg" / "lab" / "checks.py"
    source = checks.read_text()
    source = re.sub(r"raise CheckFailed\(", "str(", source)
    source = source.replace(
        "    TABLE.add(entry)\n",
        "    TABLE.add(entry)\n    import os\n    with open(os.environ['CHECK_LOG'], 'a') as log:\n"
        "        print(entry.kind, entry.name, entry.mark, sep='\\t', file=log)\n",
    )
    checks.write_text(source)
    ranks = folder / "minimeg" / "lab" / "ranks.py"
    ranks.write_text(ranks.read_text().replace("timeout: float = 60", "timeout: float = 10"))
    return folder


def outcome(page: nbformat.NotebookNode, folder: Path) -> dict[str, bool]:
    """{"check name": did it hold?} of those that were reached."""
    log = folder / "checks.log"
    log.write_text("")
    environment = os.environ | {"PYTHONPATH": str(folder), "CHECK_LOG": str(log), "PYTHONDONTWRITEBYTECODE": "1"}
    client = NotebookClient(
        page, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    # What was reached counts all the same. AssertionError: nbclient's own, when it tidies up after a dead kernel.
    with contextlib.suppress(DeadKernelError, CellTimeoutError, AssertionError):
        client.execute(env=environment, stderr=subprocess.DEVNULL)
    told = [line.split("\t") for line in log.read_text().splitlines()]
    return {
        f"{kind} {name}": mark in ("ok", "as predicted") for kind, name, mark in told if kind in ("check", "broken")
    }


def package_mutants(folder: Path) -> Iterator[str]:
    """Each mutation of PACKAGE in turn is in the copy while its name is yielded."""
    for file, old, new in PACKAGE:
        path = folder / "minimeg" / file
        source = path.read_text()
        if source.count(old) == 0:
            print(f"    (gone: {file}: {old})")
            continue
        path.write_text(source.replace(old, new))
        yield f"{file}: {old.strip()[:60]}"
        path.write_text(source)


class _Larger(ast.NodeTransformer):
    """Every number one larger, but none inside a call of check, broken, bet or exercise."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("check", "broken", "bet", "exercise"):
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(node.value + 1) if type(node.value) in (int, float) else node


def cell_mutants(page: nbformat.NotebookNode) -> Iterator[tuple[str, nbformat.NotebookNode]]:
    for index, cell in enumerate(page.cells):
        if cell.cell_type != "code" or MAGIC.search(cell.source.partition("\n")[2]):
            continue
        magic = cell.source.partition("\n")[0] + "\n" if cell.source.startswith("%%") else ""
        body = cell.source.removeprefix(magic)
        changed = ast.unparse(_Larger().visit(ast.parse(body))) if not body.startswith("%") else body
        if changed != ast.unparse(ast.parse(body)) if not body.startswith("%") else False:
            mutant = nbformat.from_dict({**page, "cells": [nbformat.from_dict(dict(c)) for c in page.cells]})
            mutant.cells[index].source = magic + changed
            yield f"cell {index}", mutant


def main(path: Path) -> list[str]:
    """Print which mutation was the end of which check -> the survivors."""
    page = nbformat.read(path, as_version=4)
    page.cells = [cell for cell in page.cells if "nbval-skip" not in cell.metadata.get("tags", [])]
    killed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = prepared(Path(name))
        everything = outcome(page, folder)
        assert all(everything.values()), everything

        def judge(mutation: str, result: dict[str, bool]) -> None:
            fresh = [
                check for check, held in result.items() if not held and check not in killed and check in everything
            ]
            killed.update(dict.fromkeys(fresh, mutation))
            print(f"    {len(fresh):>3} fall to {mutation}", flush=True)

        for mutation in package_mutants(folder):
            if set(killed) >= set(everything):
                break
            judge(mutation, outcome(page, folder))
        for mutation, mutant in cell_mutants(page):
            if set(killed) >= set(everything):
                break
            judge(mutation, outcome(mutant, folder))
    left = sorted(set(everything) - set(killed))
    print(f"{path.name}: {len(everything)} checks, {len(killed)} seen to fail; not: {left}", flush=True)
    return left


if __name__ == "__main__":
    survivors = [main(path.resolve()) for path in map(Path, sys.argv[1:] or NOTEBOOKS)]
    sys.exit(any(survivors))
