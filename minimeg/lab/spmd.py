"""``%%spmd``: the cell runs on every rank, as the next lines of one torchrun script.

SPMD is "single program, multiple data": all ranks run the same lines and differ in what ``rank`` says. State stays from cell to
cell. ``pull("name")`` brings a variable of every rank to the notebook, ``push(name=value)`` takes one there.

An error is shown once, at its own line, with the line at which every other rank was waiting. A deadlock is cut at the timeout and
explained in the same way. In both cases the ranks keep their variables, their groups are made again, and the next cell runs.

See it run: ``notebooks/00_start_here.ipynb``. The processes are those of :mod:`minimeg.lab.ranks`.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from minimeg.lab import cell, checks, output
from minimeg.lab.ranks import RankError, Ranks
from minimeg.lab.where import CELL

DEFAULT_RANKS = 4
PRELOAD = ["IPython.core.formatters", "minimeg.layers", "minimeg.models"]


class CellError(Exception):
    """Something is wrong with the cell itself. Shown without the notebook's own frames."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Interrupted(KeyboardInterrupt):
    """The interrupt button was pressed while ranks were at work."""

    def _render_traceback_(self) -> list[str]:
        return ["KeyboardInterrupt", *getattr(self, "__notes__", [])]


class Laboratory:
    """The ranks of one notebook. They start with the first cell that needs them."""

    def __init__(self) -> None:
        self.pool: Ranks | None = None
        self.cells = 0
        self.last_error: RankError | None = None  # its .failure.traceback has every frame

    def ranks(self, n: int | None = None) -> Ranks:
        """Their pool, started if need be; another number than before means new processes."""
        if self.pool is not None and n not in (None, self.pool.size):
            self.pool.close()
            self.pool = None
        if self.pool is None:
            self.pool = Ranks(n or DEFAULT_RANKS, preload=PRELOAD)
        return self.pool

    def name_cell(self) -> str:
        """A file name for the next cell, under which the ranks find its lines."""
        self.cells += 1
        return f"{CELL}{self.cells}>"

    def run(self, source: str, filename: str, options: argparse.Namespace) -> None:
        """Run a cell, show what the ranks showed, then raise what they raised."""
        pool = self.ranks(options.n)
        chosen = options.ranks if options.ranks is not None else list(range(pool.size))
        pieces: dict[int, list[output.Piece]] = {rank: [] for rank in chosen}
        error: RankError | KeyboardInterrupt | None = None
        try:
            pool.map(
                cell.run,
                dict.fromkeys(chosen, (source, filename)),
                timeout=options.timeout,
                listener=lambda rank, piece: pieces[rank].append(piece),
            )
        except RankError as failure:
            self.last_error = error = failure
        except KeyboardInterrupt as interrupt:
            error = Interrupted()
            error.__notes__ = getattr(interrupt, "__notes__", [])
        _show(pieces)
        if options.expect_error:
            if not isinstance(error, RankError):
                raise error or CellError("--expect-error: the cell ran to its end on every rank")
            print(error.describe(with_traceback=False))
        elif error is not None:
            raise error.with_traceback(None) from None

    def pull(self, expression: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """{rank: value} in rank order. ``expression`` is a name or anything Python can evaluate there, e.g. ``"w.grad"``."""
        pool = self.ranks()
        chosen = list(range(pool.size)) if ranks is None else sorted(ranks)
        return dict(zip(chosen, pool.map(cell.pull, dict.fromkeys(chosen, (expression,))), strict=True))

    def push(self, ranks: Sequence[int] | None = None, /, **values: Any) -> None:
        """Set variables on every rank (or on ``ranks``)."""
        pool = self.ranks()
        pool.map(cell.push, dict.fromkeys(range(pool.size) if ranks is None else ranks, (values,)))


LABORATORY = Laboratory()
pull, push = LABORATORY.pull, LABORATORY.push


def pool(n: int | None = None) -> Ranks:
    """The notebook's own pool, e.g. for ``pool().call(function)`` or ``pool().restart()``."""
    return LABORATORY.ranks(n)


# ---- showing ----------------------------------------------------------------------------------------------------------------


def _show(pieces: dict[int, list[output.Piece]]) -> None:
    from IPython import display

    show: Any = display.display
    for shown in output.collapse(pieces):
        if shown.kind == "check":
            checks.record(shown.content)
        elif shown.kind == "display":
            sys.stdout.flush()
            show(shown.content, raw=True)
        else:
            print(shown.content, end="", file=sys.stderr if shown.kind == "stderr" else sys.stdout)


# ---- the magics --------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from IPython.core.error import UsageError

        raise UsageError(f"%%{self.prog}: {message}")


def _parse(line: str) -> argparse.Namespace:
    parser = _Parser(prog="spmd", add_help=False)
    parser.add_argument("-n", type=int, help="number of ranks; another number than before starts new processes")
    parser.add_argument("--ranks", help='run on these only, e.g. "0,3" or "0-2"')
    parser.add_argument("--timeout", type=float, help="seconds after which the cell is cut (default 60)")
    parser.add_argument(
        "--expect-error", action="store_true", help="print the report instead of raising; raise if all is well"
    )
    options = parser.parse_args(shlex.split(line))
    if options.n is not None and options.n < 1:
        parser.error(f"-n must be at least 1, got {options.n}")
    if options.timeout is not None and not options.timeout > 0:
        parser.error(f"--timeout must be positive, got {options.timeout}")
    size = options.n or (LABORATORY.pool.size if LABORATORY.pool is not None else DEFAULT_RANKS)
    if options.ranks is not None:
        try:
            options.ranks = _numbers(options.ranks)
        except ValueError:
            parser.error(f'--ranks must look like "0,3" or "0-2", got {options.ranks!r}')
        if not options.ranks or not set(options.ranks) <= set(range(size)):
            parser.error(f"--ranks must lie in 0..{size - 1}, got {options.ranks}")
    return options


def _numbers(text: str) -> list[int]:
    """ "0,2-3" -> [0, 2, 3]."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def spmd(line: str, source: str) -> None:
    """%%spmd [-n N] [--ranks 0,3] [--timeout SECONDS] [--expect-error]

    Run the cell on every rank. ``rank``, ``world_size``, ``torch`` and ``dist`` are defined there.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    options = _parse(line)
    filename = LABORATORY.name_cell()
    # The line with %%spmd counts, so that numbers in errors are those in the margin.
    source = "\n" + str(TransformerManager().transform_cell(source))  # type: ignore[no-untyped-call]
    try:
        ast.parse(source, filename)
    except SyntaxError as error:  # not worth waking the ranks
        report = "".join(traceback.format_exception_only(error)).rstrip()
        raise CellError(report.replace(f'File "{filename}"', "this cell")) from None
    LABORATORY.run(source, filename, options)


def load(shell: Any) -> None:
    """``%load_ext minimeg.lab``."""
    shell.register_magic_function(spmd, magic_kind="cell", magic_name="spmd")
    shell.push({"pull": pull, "push": push})
