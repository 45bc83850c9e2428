"""Who failed first? The black boxes of all ranks, read after the end.

When one rank fails, the others fail too, and theirs may be the louder errors. So failures are sorted into *own* ones (an exception, a
death without a word) and *consequences* (a connection closed by the other side, a wait that ran out of time, a signal from the
launcher), and among the own ones the first by time is the cause. Within one host all clocks are one.

See it run: ``MINIMEG_FAULT=2:3:forward:kill python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2``.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from minimeg.comm import CommunicationError
from minimeg.faults.blackbox import Ending, Snapshot


def classify(error: BaseException) -> tuple[Ending, str]:
    """How an exception is to be told: (ending, one line). A peer's death shows as an error in those who talk to it."""
    if isinstance(error, KeyboardInterrupt):
        return "signal", ", ".join(["SIGINT (Ctrl-C)", *map(str, error.args)])
    if isinstance(error, SystemExit):
        return "failed", f"SystemExit({error.code!r}) in the middle of the run"
    cause = error.__cause__ if isinstance(error, CommunicationError) and error.__cause__ is not None else error
    line = _PATH.sub("", str(cause).partition("\n")[0].partition(". This is typically")[0])
    if isinstance(cause, RuntimeError):
        if any(words in line.lower() for words in ("timed out", "timeout")):
            return "late", line
        if isinstance(cause, dist.DistNetworkError) or any(words in line.lower() for words in _LOST):
            return "lost", line
    return "failed", traceback.format_exception_only(error)[0].partition("\n")[0]


_PATH = re.compile(r"^\[[^ ]*\] ")  # gloo begins with the place in its source
# What gloo, the store and NCCL say when the other side is gone.
_LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "gloo/transport",
    "remote process exited",
    "communicator was aborted",
)


SILENT = 2.0  # seconds without a beat (which comes every 0.25 s) after which a rank counts as stopped, once something is wrong


def verdict(ranks: Sequence[Snapshot]) -> Snapshot:
    """The rank that failed first by itself.

    1. Of those that raised an error of their own or died without a word, the first by time. (After the others those that C++ aborted:
       gloo does that to a rank whose peer is gone.)
    2. Else one that is stopped: alive, and silent.
    3. Else the first sign by time: a lost connection (its cause is then on another host), a signal, a wait that ran out of time.
       Before a wait comes a rank that does not wait itself: it kept the others waiting.
    """
    own = [rank for rank in ranks if rank.ending == "failed" or rank.died]
    if own:
        return min(own, key=lambda rank: ("Aborted" in rank.crash, rank.time))
    stopped = [rank for rank in ranks if rank.alive and rank.silent >= SILENT and rank.ending == "running"]
    if stopped:
        return max(stopped, key=lambda rank: rank.silent)
    signs = [rank for rank in ranks if rank.ending in ("lost", "late", "signal")]
    first = min(signs, key=lambda rank: rank.time, default=ranks[0])
    busy = [rank for rank in ranks if rank.ending == "running" and not rank.waits]
    return min(busy, key=lambda rank: rank.place_time) if first.ending == "late" and busy else first


def summary(ranks: Sequence[Snapshot], elsewhere: int = 0) -> str:
    """The first line names the rank that failed first; then one line a rank of this host; then the stack of the first.

    Args:
        elsewhere: number of ranks on other hosts, of which nothing is known here.
    """
    first = verdict(ranks)
    lines = [f"minimeg: {_headline(first)}"]
    for rank in ranks:
        mark = "first" if rank is first else "then "
        lines.append(f"  {mark}  {rank.name}: {_fate(rank)}; {rank.place}; last operation: {rank.operation or 'none'}")
    if elsewhere:
        lines.append(f"  {elsewhere} more ranks are on other hosts; if none above failed by itself, the cause is there")
    if first.trace:
        lines.append(f"the stack of rank {first.rank}:\n{first.trace.rstrip()}")
    return "\n".join(lines) + "\n"


def _headline(first: Snapshot) -> str:
    last = f"last operation: {first.operation or 'none'}"
    if first.ending == "signal":
        return f"ended from outside: {first.name} {_fate(first)}, {first.place}; {last}"
    if first.ending in ("lost", "late"):
        return (
            f"no rank of this host failed by itself; {first.name} gave up first, {first.place}: {_fate(first)}; {last}"
        )
    failing = first.ending == "failed" or first.died or first.silent >= SILENT
    return f"{first.name} {'failed first' if failing else 'kept the others waiting'}, {first.place}: {_fate(first)}; {last}"


def _fate(rank: Snapshot) -> str:
    if rank.died:
        return f"died: {rank.crash}" if rank.crash else "died without a word (kill -9, out of memory, os._exit)"
    if rank.ending != "running":
        told = {"done": "done", "lost": "lost a peer", "late": "waited in vain", "signal": "was told to end"}
        return ": ".join(filter(None, (told.get(rank.ending, ""), rank.line)))
    if rank.silent >= SILENT:
        return f"no sign of life for {rank.silent:.0f} s (stopped, or stuck with the interpreter locked)"
    return f"{'waiting' if rank.waits else 'busy'} for {time.monotonic() - rank.place_time:.1f} s"
