"""A notebook cell on one rank: it runs there as the next lines of the same script.

The rank's own ``__main__`` module is the script. It starts with what a torchrun script would fetch first: ``rank``,
``world_size``, ``device``, ``torch`` and ``dist`` (``torch.distributed``). What a cell prints and shows is sent to the notebook
piece by piece, so that nothing is lost when the cell fails later.

See it run: ``notebooks/00_start_here.ipynb``; the notebook's side is :mod:`minimeg.lab.spmd`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any

from minimeg.lab import checks, groups, where
from minimeg.lab.worker import emit

Bundle = dict[str, Any]  # MIME type -> data, as Jupyter has it

_MAIN = types.ModuleType("__main__")


# ---- what the notebook asks a rank to do -------------------------------------------------------------------------------------


def run(source: str, filename: str) -> None:
    """Run the cell; show the value of its last line if that is an expression without a semicolon."""
    script, where.current_cell = _script(), filename
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    with _captured():
        exec(compile(tree, filename, "exec", dont_inherit=True), script)
        if last is not None:
            value = eval(compile(last, filename, "eval", dont_inherit=True), script)
            if value is not None:
                display(value)


def pull(expression: str) -> Any:
    """The value of a variable, or of an expression such as ``"w.grad"``."""
    return eval(compile(expression, f"pull({expression!r})", "eval", dont_inherit=True), _script())


def push(values: dict[str, Any]) -> None:
    """Set variables."""
    _script().update(values)


# ---- the script and its surroundings -------------------------------------------------------------------------------------------


def _script() -> dict[str, Any]:
    names = _MAIN.__dict__
    if "rank" not in names:
        import torch
        import torch.distributed as dist

        sys.modules["__main__"] = _MAIN  # so that classes of a cell can be pickled
        device = groups.device()
        if dist.get_backend() == "nccl":  # which knows no tensors of the CPU
            torch.set_default_device(device)
        names.update(__builtins__=builtins, rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)
        names.update(torch=torch, dist=dist, display=display, get_ipython=_shell)
        checks.SINK = lambda entry: emit(("check", entry))
    return names


@contextlib.contextmanager
def _captured() -> Iterator[None]:
    """What is printed goes to the notebook; so does what ``IPython.display.display`` shows."""
    streams = _Stream("stdout"), _Stream("stderr")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(streams[0]))
        stack.enter_context(contextlib.redirect_stderr(streams[1]))
        for name in ("IPython.display", "IPython.core.display_functions"):
            if name in sys.modules:
                sys.modules[name].display = display  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for stream in streams:
                stream.flush()


class _Stream(io.TextIOBase):
    """Sends whole lines as they come."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rest = kind, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines, newline, self.rest = (self.rest + text).rpartition("\n")
        if newline:
            emit((self.kind, lines + newline))
        return len(text)

    def flush(self) -> None:
        if self.rest:
            text, self.rest = self.rest, ""
            emit((self.kind, text))


def display(*values: Any, **ignored: Any) -> None:
    """Show each value in the notebook, as a picture or table where it has one."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for value in values:
        emit(("display", bundle(value)))


def bundle(value: Any) -> Bundle:
    """All forms in which a notebook can show ``value``: text, HTML, SVG, ..."""
    from IPython.core.formatters import DisplayFormatter

    formatter: Any = DisplayFormatter()
    forms, _ = formatter.format(value)
    return {kind: data for kind, data in forms.items() if data is not None}


def _shell() -> Any:
    """What line magics (``%time f()``) and ``!commands`` in a cell call: a shell of this rank, made when first needed."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    if not InteractiveShell.initialized():
        InteractiveShell.instance(user_module=_MAIN, config=Config({"HistoryManager": {"enabled": False}}))
    return InteractiveShell.instance()
