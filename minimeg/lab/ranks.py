"""A pool of ranks: N processes that wait for work, as a notebook and a test suite want them.

``torchrun`` starts processes for one script and ends them. Here they stay: four are up in a fraction of a second, because they
are forked from a server that has imported torch already; a call takes a millisecond; after an error the groups are made again
and the pool goes on, variables and all.

    >>> with Ranks(2) as pool:
    ...     pool.call(divmod, 7, 2)
    [(3, 1), (3, 1)]

What the parent does here, the worker answers in :mod:`minimeg.lab.worker`; who is blamed is decided in
:mod:`minimeg.lab.report`. See it run: ``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from minimeg.lab import worker
from minimeg.lab.report import Failure, RankError, Story, where_table

__all__ = ["RankError", "Ranks"]

# Imported once, in the server from which the ranks are forked. Nothing here may touch CUDA, which does not survive a fork.
PRELOAD = ["torch", "torch.distributed", "minimeg.lab.worker", "minimeg.parallel_state"]
SETTLE = 0.2  # seconds in which other ranks may still fail by themselves, or reach the line at which they wait
GRACE = 10.0  # seconds until a freed rank must have answered


@dataclass
class _Rank:
    process: BaseProcess
    tasks: Connection
    control: Connection
    lifeline: Connection


class Ranks:
    """``n`` processes inside one initialised ``torch.distributed`` group: NCCL with a GPU for each, else gloo.

    Args:
        n: number of ranks.
        timeout: seconds after which a call is cut, unless the call gives its own.
        device: "auto", or "cpu" to hide GPUs from the ranks.
        threads: of each rank; default: OMP_NUM_THREADS if set, else the cores shared out, at least 1.
        preload: modules to import in the server as well (only before the first pool of this process starts).

    The processes start with the first call. They end with :meth:`close`, with this process, or with its death.
    """

    def __init__(
        self,
        n: int,
        timeout: float = 60,
        *,
        device: str = "auto",
        threads: int | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        if n < 1 or not timeout > 0 or device not in ("auto", "cpu"):
            raise ValueError(
                f'Ranks needs n >= 1, timeout > 0 and device "auto" or "cpu"; got n={n}, timeout={timeout}, device={device!r}'
            )
        self.size, self.timeout, self.device = n, timeout, device
        self.threads = threads if threads is not None else threads_per_rank(n)
        self._preload = list(preload)
        self._ranks: list[_Rank] = []
        self._joined = False
        self._number = 0
        self._close = weakref.finalize(self, _stop, self._ranks, os.getpid())

    # ---- what callers use --------------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank at once -> the results in rank order.

        ``function``, arguments and results travel by pickle: the function must be importable (module level).

        Raises:
            RankError: a rank raised, died, or the call took longer than ``timeout`` seconds. The pool stays usable.
        """
        job = _pack(function, args, kwargs)
        return self._run(dict.fromkeys(range(self.size), job), timeout)

    def map(
        self, function: Callable[..., Any], per_rank_args: Iterable[Sequence[Any]], timeout: float | None = None
    ) -> list[Any]:
        """Like :meth:`call`, rank r with ``function(*per_rank_args[r])``."""
        jobs = [_pack(function, tuple(args), {}) for args in per_rank_args]
        if len(jobs) != self.size:
            raise ValueError(f"per_rank_args must hold one tuple for each of the {self.size} ranks, got {len(jobs)}")
        return self._run(dict(enumerate(jobs)), timeout)

    def reset(self) -> None:
        """Leave all groups, also those that called functions made, and form the first one again. Variables stay."""
        self.leave_groups()
        self._prepare()

    def leave_groups(self) -> None:
        """The first half of :meth:`reset`; the next call does the second."""
        self._joined = False

    def restart(self) -> None:
        """New processes: nothing of the old ones remains."""
        self.close()
        self._prepare()

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        _stop(self._ranks, os.getpid())
        self._joined = False

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty before the first call."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- starting and joining ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Have ``size`` living processes that form one group."""
        if any(not rank.process.is_alive() for rank in self._ranks):
            self.close()
        if not self._ranks:
            self._start()
        if not self._joined:
            port = self._exchange({0: _pack(worker.open_store, (), {})}, self.timeout)[0]
            self._exchange(dict.fromkeys(range(self.size), _pack(worker.join, (port, self.device), {})), self.timeout)
            self._joined = True

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
        context.set_forkserver_preload([*PRELOAD, *self._preload])
        environment = dict(os.environ)
        with _without_main_module(), _environment_default("TORCH_CPP_LOG_LEVEL", "ERROR"):
            for rank in range(self.size):
                settings = worker.Settings(rank, self.size, os.getpid(), self.threads, self.device, environment)
                tasks, their_tasks = context.Pipe()
                control, their_control = context.Pipe()
                their_lifeline, lifeline = context.Pipe(duplex=False)
                theirs = (their_tasks, their_control, their_lifeline)
                # Not a daemon, or data loaders could not start processes of their own; _stop ends it.
                process = context.Process(target=worker.main, args=(settings, *theirs), name=f"rank{rank}")
                process.start()
                self._ranks.append(_Rank(process, tasks, control, lifeline))
                for end in theirs:
                    end.close()  # so that the pipe ends when the rank does

    # ---- one call ----------------------------------------------------------------------------------------------------------

    def _run(self, jobs: dict[int, bytes], timeout: float | None) -> list[Any]:
        self._prepare()
        results = self._exchange(jobs, self.timeout if timeout is None else timeout)
        return [results[rank] for rank in sorted(jobs)]

    def _exchange(self, jobs: dict[int, bytes], timeout: float) -> dict[int, Any]:
        """Send each rank its job and wait for all answers; at the first sign of trouble free everybody and explain."""
        self._number += 1
        for rank, job in jobs.items():
            with contextlib.suppress(OSError):  # a dead rank is noticed below
                self._ranks[rank].tasks.send((self._number, job))
        results: dict[int, Any] = {}
        story = Story()
        pending = set(jobs)
        try:
            self._listen(pending, results, story, time.monotonic() + timeout, until_trouble=True)
        except BaseException as error:  # Ctrl-C, or the kernel's interrupt button
            self._untangle(pending, results, story)
            error.add_note("\n".join(["Where the ranks were:", *where_table(story.waiting)]))
            raise
        if not pending and not story.failures and not story.died:
            return results
        if not story.failures and not story.died:
            story.timeout = timeout
        self._untangle(pending, results, story)
        raise story.verdict()

    def _listen(
        self, pending: set[int], results: dict[int, Any], story: Story, deadline: float, until_trouble: bool = False
    ) -> None:
        """Collect answers of the ``pending`` ranks until all are in or ``deadline`` has passed."""
        while pending and not (until_trouble and (story.failures or story.died)):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            tasks = {self._ranks[rank].tasks: rank for rank in pending}
            ready = wait([*tasks, *(self._ranks[rank].process.sentinel for rank in pending)], remaining)
            for rank in sorted(pending):
                if self._ranks[rank].tasks in ready:
                    self._take_answer(rank, pending, results, story)
                elif self._ranks[rank].process.sentinel in ready:
                    self._bury(rank, pending, story)

    def _take_answer(self, rank: int, pending: set[int], results: dict[int, Any], story: Story) -> None:
        try:
            number, kind, value = pickle.loads(self._ranks[rank].tasks.recv_bytes())
        except (EOFError, OSError):
            return self._bury(rank, pending, story)
        if number != self._number:
            return None  # the late answer to a call that was given up
        pending.discard(rank)
        if kind == "failed":
            story.failures[rank] = value
        elif kind == "done":
            try:
                results[rank] = pickle.loads(value)
            except Exception as error:
                text = f"its result cannot be read here: {type(error).__name__}: {error}"
                story.failures[rank] = Failure(rank, time.monotonic(), type(error).__name__, text, text)
        return None

    def _bury(self, rank: int, pending: set[int], story: Story) -> None:
        process = self._ranks[rank].process
        process.join(1)
        pending.discard(rank)
        story.died[rank] = process.exitcode

    def _untangle(self, pending: set[int], results: dict[int, Any], story: Story) -> None:
        """After trouble: note where each rank is, free all, and leave the pool ready for the next call."""
        self._listen(pending, results, story, time.monotonic() + SETTLE)
        everyone = set(range(self.size))
        story.waiting = dict.fromkeys(everyone - pending - set(story.failures) - set(story.died), "finished")
        where = self._ask("where", pending)
        story.waiting |= {rank: where.get(rank, "not answering: native code holds its interpreter") for rank in pending}
        self._joined = False
        freed = self._ask("free", everyone - set(story.died))
        aftermath = Story()  # what fails now fails because it was freed; only a death still counts
        self._listen(pending, results, aftermath, time.monotonic() + GRACE if set(freed) >= pending else 0)
        story.died |= aftermath.died
        if pending or story.died or len(freed) + len(story.died) < self.size:
            story.restarted = True
            self.close()

    def _ask(self, question: str, ranks: set[int]) -> dict[int, str]:
        """Put a question to the control threads -> what they answered within 2 seconds."""
        answers: dict[int, str] = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._ranks[rank].control.send(question)
        waiting, deadline = set(ranks), time.monotonic() + 2
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            ready = wait([self._ranks[rank].control for rank in waiting], remaining)
            for rank in [rank for rank in waiting if self._ranks[rank].control in ready]:
                waiting.discard(rank)
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = self._ranks[rank].control.recv()
        return answers


def threads_per_rank(n: int) -> int:
    """max(1, cores // n), or OMP_NUM_THREADS: n ranks with a thread for every core each would fight for them."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // n)


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
    if module == "__main__" or "<locals>" in name or "<lambda>" in name:
        raise ValueError(
            f"{module}.{name} cannot be sent to the ranks: they import a function by its name; define it at the top level of a "
            "module that can be imported"
        )
    return worker.dumps((function, args, kwargs))


def _stop(ranks: list[_Rank], owner: int) -> None:
    """End the processes and empty the list. Does nothing in a forked copy of the owner."""
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
    """The server inherits it when it starts: no C++ warnings about connections that we close on purpose."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
