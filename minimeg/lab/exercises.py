"""``exercise``: a blank to fill in, judged where it runs.

    def mean(x):
        return ...                                    # your line

    exercise("A  mean over the ranks", mean, [(torch.tensor([rank + 1.0]), 2.5)])

    task   A  mean over the ranks                                             open
    task   A  mean over the ranks                                     WRONG on 0-2
           r0-2  of 1   yours 10   right 2.5
    task   A  mean over the ranks                                               ok

A cell in which a blank (``...``) is left is *open*: nothing of it is called, nothing is raised, so that "run all cells" gets to the
end. In a ``%%spmd`` cell the judging happens on every rank, and the line says which of them are wrong. The solution is folded in
the cell beneath; tests/notebooks/test_exercises.py puts it into the blank.

See it run: the end of every notebook.
"""

from __future__ import annotations

import ast
import linecache
import sys
from types import FrameType
from typing import Any

from minimeg.lab.checks import WIDTH, Entry, compare, record, show

OPEN, OK, WRONG = "open", "ok", "WRONG"
SHOWN = 3  # wrong cases that are shown


def exercise(name: str, yours: Any, right: Any, tol: float = 0.0) -> None:
    """Judge an answer, on one line; if it is wrong, show yours beside the right one.

    Args:
        name: "A  what it is about".
        yours: what the reader filled in: a function, or a value.
        right: for a function, a list of (arguments, right result), where a single argument needs no tuple; else the right value.
        tol: largest absolute difference.
    """
    if blank_in(sys._getframe(1)) or yours is ...:
        record(Entry("task", name, "", "", "", OPEN))
        return
    if callable(yours):
        cases = [(args if isinstance(args, tuple) else (args,), want) for args, want in right]
        results = [(f"of {', '.join(show(arg, 20) for arg in args)}   ", yours(*args), want) for args, want in cases]
    else:
        results = [("", yours, right)]
    wrong = [(given, mine, want) for given, mine, want in results if not compare(mine, want)[0] <= tol]
    told = tuple(line for case in wrong[:SHOWN] for line in _side_by_side(*case))
    record(Entry("task", name, "", "", "", WRONG if wrong else OK, details=told))


def _side_by_side(given: str, yours: Any, right: Any) -> list[str]:
    """Both on one line, or below each other where they are long."""
    line = f"{given}yours {show(yours)}   right {show(right)}"
    if len(line) <= WIDTH - 18:  # room for the margin and the name of a rank
        return [line]
    return [*([given.strip()] if given else []), f"yours {show(yours, 54)}", f"right {show(right, 54)}"]


def blank_in(frame: FrameType) -> bool:
    """Whether the caller's cell (or function) has a ``...`` left. An index such as ``x[..., 0]`` is none."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if not frame.f_code.co_name.startswith("<"):  # called inside a function: only that
        tree = ast.parse("".join(lines))
        first = frame.f_code.co_firstlineno
        found = [node for node in ast.walk(tree) if getattr(node, "name", "") == frame.f_code.co_name]
        return any(node.lineno <= first <= (node.end_lineno or 0) and has_blank(node) for node in found)  # type: ignore[attr-defined]
    return has_blank(ast.parse("".join(lines)))


def has_blank(node: ast.AST) -> bool:
    """Whether there is an Ellipsis in the tree, other than in an index."""
    if isinstance(node, ast.Subscript):
        return has_blank(node.value)
    if isinstance(node, ast.Constant):
        return node.value is ...
    return any(map(has_blank, ast.iter_child_nodes(node)))
