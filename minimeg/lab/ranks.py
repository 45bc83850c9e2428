"""A pool of ranks: N processes that wait for work, as a notebook and a test suite want them.

``torchrun`` starts processes for one script and ends them. Here they stay: four are up in a fraction of a second, because they
are forked from a server that has imported torch already; a call takes a millisecond; after an error the groups are made again
and the pool goes on, variables and all.

    >>> with Ranks(2) as pool:
    ...     pool.call(divmod, 7, 2)
    [(3, 1), (3, 1)]

What the parent asks here, the worker answers in :mod:`minimeg.lab.worker`; who is blamed is decided in
:mod:`minimeg.lab.report`. See it run: ``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from minimeg.lab import groups, processes, worker
from minimeg.lab.report import Failure, RankError, Story, where_table

__all__ = ["RankError", "Ranks"]

SETTLE = 0.1  # seconds in which, after the first failure, other ranks may still fail by themselves
ANSWER = 3.0  # seconds within which a control thread must answer
GRACE = 10.0  # seconds within which a freed rank must be out of its call

Listener = Callable[[int, Any], None]  # (rank, what it emitted)


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
        self.threads = threads if threads is not None else processes.threads_per_rank(n)
        self._preload = list(preload)
        self._ranks: list[processes.Rank] = []
        self._joined = False
        self._keep_groups = False  # form the called functions' own groups again, too
        self._number = 0
        self._listener: Listener | None = None
        self._stop = weakref.finalize(self, processes.stop, self._ranks, os.getpid())

    # ---- what callers use --------------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank at once -> the results in rank order.

        ``function``, arguments and results travel by pickle: the function must be importable (module level).

        Raises:
            RankError: a rank raised, died, or the call took longer than ``timeout`` seconds. The pool stays usable.
        """
        return self._run(dict.fromkeys(range(self.size), _pack(function, args, kwargs)), timeout)

    def map(
        self,
        function: Callable[..., Any],
        per_rank_args: Sequence[Sequence[Any]] | Mapping[int, Sequence[Any]],
        timeout: float | None = None,
        listener: Listener | None = None,
    ) -> list[Any]:
        """Like :meth:`call`, rank r with ``function(*per_rank_args[r])``; with a dict, only the ranks in it take part.

        ``listener(rank, value)`` is called for each value that the function passes to :func:`minimeg.lab.worker.emit`.
        """
        named = dict(per_rank_args if isinstance(per_rank_args, Mapping) else enumerate(per_rank_args))
        if not named or not set(named) <= set(range(self.size)):
            raise ValueError(f"per_rank_args must name ranks among 0..{self.size - 1}, got {sorted(named)}")
        if not isinstance(per_rank_args, Mapping) and len(named) != self.size:
            raise ValueError(f"per_rank_args must hold one tuple for each of the {self.size} ranks, got {len(named)}")
        return self._run({rank: _pack(function, tuple(args), {}) for rank, args in named.items()}, timeout, listener)

    def reset(self) -> None:
        """Leave all groups, also those that called functions made, and form the first one again. Variables stay."""
        self.leave_groups()
        self._prepare()

    def leave_groups(self) -> None:
        """:meth:`reset`, put off until the next call."""
        self._joined = self._keep_groups = False

    def restart(self) -> None:
        """New processes: nothing of the old ones remains."""
        self.close()
        self._prepare()

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        processes.stop(self._ranks, os.getpid())
        self.leave_groups()

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty before the first call."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- one call ----------------------------------------------------------------------------------------------------------

    def _run(self, jobs: dict[int, bytes], timeout: float | None, listener: Listener | None = None) -> list[Any]:
        self._prepare()
        self._listener = listener
        try:
            results = self._exchange(jobs, self.timeout if timeout is None else timeout)
        finally:
            self._listener = None
        return [results[rank] for rank in sorted(jobs)]

    def _prepare(self) -> None:
        """Have ``size`` living processes that form one group."""
        dead = [rank for rank, held in enumerate(self._ranks) if not held.process.is_alive()]
        if dead:
            self.close()
            warnings.warn(f"rank {dead[0]} died between calls; all ranks start again, without variables", stacklevel=4)
        if not self._ranks:
            self._ranks += processes.start(self.size, self.threads, self.device, self._preload)
        if not self._joined:
            everyone = range(self.size)
            answers = self._exchange(
                dict.fromkeys(everyone, _pack(groups.leave, (self._keep_groups,), {})), self.timeout
            )
            again = groups.agreed([answers[rank][1] for rank in everyone])
            job = _pack(groups.join, (answers[0][0], self.device, again), {})
            self._exchange(dict.fromkeys(everyone, job), self.timeout)
            self._joined = self._keep_groups = True

    def _exchange(self, jobs: dict[int, bytes], timeout: float) -> dict[int, Any]:
        """Send each rank its job and wait for all answers; at the first sign of trouble free everybody and explain."""
        self._number += 1
        for rank, job in jobs.items():
            with contextlib.suppress(OSError):  # a dead rank is noticed below
                self._ranks[rank].tasks.send((self._number, job))
        results: dict[int, Any] = {}
        story, pending = Story(), set(jobs)
        try:
            self._listen(pending, results, story, time.monotonic() + timeout, until_trouble=True)
            if pending or story.failures or story.died:
                story.timeout = None if story.failures or story.died else timeout
                self._untangle(set(jobs), pending, results, story)
                raise story.verdict()
        except RankError:
            raise
        except BaseException as error:  # Ctrl-C, or the kernel's interrupt button
            try:
                self._untangle(set(jobs), pending, results, story)
            except BaseException:
                self.close()
                raise
            error.add_note("\n".join(["Where the ranks were:", *where_table(story.waiting)]))
            raise
        return results

    def _listen(
        self, pending: set[int], results: dict[int, Any], story: Story, deadline: float, until_trouble: bool = False
    ) -> None:
        """Collect answers of the ``pending`` ranks until all are in or ``deadline`` has passed."""
        while pending and not (until_trouble and (story.failures or story.died)):
            tasks = [self._ranks[rank].tasks for rank in pending]
            sentinels = [self._ranks[rank].process.sentinel for rank in pending]
            ready = wait([*tasks, *sentinels], max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in sorted(pending):
                if self._ranks[rank].tasks in ready:
                    self._take_answer(rank, pending, results, story)
                elif self._ranks[rank].process.sentinel in ready:
                    self._bury(rank, pending, story)

    def _take_answer(self, rank: int, pending: set[int], results: dict[int, Any], story: Story) -> None:
        try:
            number, kind, value = pickle.loads(self._ranks[rank].tasks.recv_bytes())
        except (EOFError, OSError):
            self._bury(rank, pending, story)
            return
        if number != self._number:
            return  # the late answer to a call that was given up
        if kind == "output":
            if self._listener is not None:
                self._listener(rank, value)
            return
        pending.discard(rank)
        if kind == "failed":
            story.failures[rank] = value
        elif kind == "done":
            packed, in_a_group = value
            self._joined = self._joined and in_a_group  # the function may have destroyed it
            try:
                results[rank] = pickle.loads(packed)
            except Exception as error:
                text = f"the result cannot be read in this process: {type(error).__name__}: {error}"
                story.failures[rank] = Failure(rank, time.monotonic(), type(error).__name__, text, text)

    def _bury(self, rank: int, pending: set[int], story: Story) -> None:
        process = self._ranks[rank].process
        process.join(1)
        pending.discard(rank)
        story.died[rank] = process.exitcode

    def _untangle(self, working: set[int], pending: set[int], results: dict[int, Any], story: Story) -> None:
        """After trouble: note where each rank is, free all, and leave the pool ready for the next call."""
        self._joined = False
        self._listen(pending, results, story, time.monotonic() + SETTLE)
        places = self._ask("where", pending)
        self._listen(pending, results, story, time.monotonic())  # who failed while the others were asked
        deaf = {rank for rank in pending if rank not in places}
        story.waiting = dict.fromkeys(working - pending - set(story.failures) - set(story.died), "finished")
        story.waiting |= {
            rank: places.get(rank, "not answering: native code holds its interpreter") for rank in pending
        }
        freed = self._ask("free", set(range(self.size)) - set(story.died) - deaf)
        aftermath = Story()  # what fails now fails because it was freed; only a death still counts
        self._listen(pending, results, aftermath, time.monotonic() + (0 if deaf else GRACE))
        story.died |= aftermath.died
        if pending or len(freed) < self.size:
            story.restarted = True
            self.close()

    def _ask(self, question: str, ranks: set[int]) -> dict[int, str]:
        """Put a question to the control threads -> what they answered in time."""
        answers: dict[int, str] = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._ranks[rank].control.send(question)
        waiting, deadline = set(ranks), time.monotonic() + ANSWER
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            ready = wait([self._ranks[rank].control for rank in waiting], remaining)
            for rank in [rank for rank in waiting if self._ranks[rank].control in ready]:
                waiting.discard(rank)
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = self._ranks[rank].control.recv()
        return answers


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
    if module == "__main__" or "<locals>" in name or "<lambda>" in name:
        raise ValueError(
            f"{module}.{name} cannot be sent to the ranks: they import a function by its name; define it at the top level of a "
            "module that can be imported"
        )
    return worker.dumps((function, args, kwargs))
