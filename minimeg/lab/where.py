"""Which line is it? Frames and tracebacks, told in terms of the caller's own code.

A rank that waits sits thirty frames deep in torch. What the reader wants to know is the line of *their* script or notebook cell
from which it went there. See it run: the deadlock cell of ``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sysconfig
import time
import traceback
from pathlib import Path
from types import FrameType

from minimeg.lab.report import Failure

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HOUSE = str(Path(__file__).resolve().parent.parent) + os.sep
_MACHINERY = str(Path(__file__).resolve().parent) + os.sep

CELL = "<spmd "  # how the file names of notebook cells begin
current_cell = ""  # the one that this rank is running

Place = tuple[FrameType, int]  # a frame and its current line


def locate(frame: FrameType) -> str:
    """``step.py:12, in forward: x = group.all_reduce(x)``: the innermost line that is the caller's own.

    Neither of torch nor of the standard library nor, if anything else is found, of minimeg.
    """
    return tell(own_place([*traceback.walk_stack(frame)]))


def own_place(places: list[Place]) -> Place | None:
    """``places``: innermost first."""

    def outside(*folders: str) -> list[Place]:
        return [p for p in places if not p[0].f_code.co_filename.startswith((*folders, "<frozen", "<string>"))]

    candidates = outside(*_LIBRARIES, _HOUSE) or outside(*_LIBRARIES, _MACHINERY) or places
    return candidates[0] if candidates else None


def tell(place: Place | None, with_source: bool = True) -> str:
    """A place in words. Paths are relative to the present folder, or to the library they belong to."""
    if place is None:
        return "an unknown line"
    frame, line = place
    code = frame.f_code
    if code.co_filename.startswith(CELL):
        where = f"line {line}" if code.co_filename == current_cell else f"line {line} of an earlier cell"
    else:
        where = f"{_short(code.co_filename)}:{line}"
    if code.co_name != "<module>":
        where += f", in {code.co_name}"
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip() if with_source else ""
    return f"{where}: {source}" if source else where


def _short(filename: str) -> str:
    for folder in (str(Path.cwd()) + os.sep, *sorted(_LIBRARIES, key=len, reverse=True)):
        if filename.startswith(folder):
            return filename.removeprefix(folder)
    return filename if filename.startswith("<") else Path(filename).name


def describe(rank: int, error: BaseException) -> Failure:
    """An exception in a form that travels: text, without the frames of the pool itself."""
    when = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        trace = trace.tb_next
    places = [*traceback.walk_tb(trace)]
    shown = [place for place in places if not place[0].f_code.co_filename.startswith(_MACHINERY)]
    steps = [tell(place, with_source=not place[0].f_code.co_filename.startswith(_LIBRARIES)) for place in shown]
    if isinstance(error, SyntaxError) and error.filename:
        steps.append(f"{_short(error.filename)}:{error.lineno}: {(error.text or '').strip()}")
    return Failure(
        rank=rank,
        when=when,
        name=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, trace)),
        steps=steps,
        line=tell(own_place(places[::-1])) if places else "",
        exception=_portable(error),
    )


def _portable(error: BaseException) -> BaseException | None:
    """The exception itself, if the parent can read it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copy if isinstance(copy, BaseException) else None
