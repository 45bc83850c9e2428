"""Starting and ending the processes of a pool: quickly, without running the caller's script again, leaving nothing behind.

``forkserver``: one process imports torch (a second or two) and every rank is forked from it (milliseconds), with none of the
caller's threads, locks or CUDA contexts. macOS has it too; Windows has only ``spawn``, where each rank imports torch itself.
Only Linux has been tried; ``spawn`` has been tried there.

See it run: ``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from minimeg.lab import worker

# Imported once, in the server from which the ranks are forked. Nothing here may touch CUDA, which does not survive a fork.
PRELOAD = ["torch", "torch.distributed", "minimeg.lab.worker", "minimeg.lab.cell", "minimeg.parallel_state"]


@dataclass
class Rank:
    """The parent's hold on one process. ``lifeline`` carries nothing; that it closes is the message."""

    process: BaseProcess
    tasks: Connection
    control: Connection
    lifeline: Connection


def start(size: int, threads: int, device: str, preload: Sequence[str]) -> list[Rank]:
    """``size`` new processes, waiting for work. They have not met yet."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([*PRELOAD, *preload])
    environment = dict(os.environ)
    ranks: list[Rank] = []
    with _without_main_module(), _environment_default("TORCH_CPP_LOG_LEVEL", "ERROR"):
        for rank in range(size):
            settings = worker.Settings(rank, size, os.getpid(), threads, device, environment)
            tasks, their_tasks = context.Pipe()
            control, their_control = context.Pipe()
            their_lifeline, lifeline = context.Pipe(duplex=False)
            theirs = (their_tasks, their_control, their_lifeline)
            # Not a daemon, or data loaders could not start processes of their own; stop() ends it.
            process = context.Process(target=worker.main, args=(settings, *theirs), name=f"rank{rank}")
            process.start()
            ranks.append(Rank(process, tasks, control, lifeline))
            for end in theirs:
                end.close()  # so that the pipe ends when the rank does
    return ranks


def stop(ranks: list[Rank], owner: int) -> None:
    """End the processes and empty the list. Does nothing in a forked copy of the process ``owner``."""
    if os.getpid() != owner:
        return
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.control.send("exit")
    deadline = time.monotonic() + 0.5
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join(5)
        for end in (rank.tasks, rank.control, rank.lifeline):
            end.close()
    ranks.clear()


def threads_per_rank(n: int) -> int:
    """max(1, cores // n), or OMP_NUM_THREADS: n ranks with a thread for every core each would fight for them."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // n)


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """multiprocessing runs the caller's script again in every child to find its functions; the ranks have no use for that,
    and a script without ``if __name__ == "__main__"`` would start ranks from its ranks."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _environment_default(name: str, value: str) -> Iterator[None]:
    """The server inherits it when it starts: no C++ warnings about connections that are closed on purpose."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
