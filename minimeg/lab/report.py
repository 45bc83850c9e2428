"""Who is to blame, and where was everybody else? The one error that a pool of ranks raises, and how it finds the culprit.

When one rank of a job fails, the others fail too: their connection to it closes. The launcher that reports whichever process
ended first therefore often blames a neighbour (pytorch issue 113546). Three rules find the right one:

1. the first Python exception by the clock wins, unless it only says that a connection was lost;
2. then a process that died without a word (killed, crashed);
3. then the first lost connection.

If nobody failed and the time ran out, nobody is blamed: the report says who had finished and at which line the others waited.

See it run: the deadlock cell of ``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

LOST_PEER = re.compile(
    r"[Cc]onnection (was )?(likely )?(closed|reset|refused)|Broken pipe|Socket closed|remote process exited"
)


@dataclass
class Failure:
    """An exception on one rank, as its worker describes it. ``when`` is a reading of the machine's monotonic clock."""

    rank: int
    when: float
    name: str  # "ValueError"
    message: str
    traceback: str
    steps: list[str] = field(
        default_factory=list
    )  # its frames in short, outermost first: "step.py:12, in forward: y = f(x)"
    line: str = ""  # of these, the innermost line of the user's own code
    exception: BaseException | None = None

    @property
    def lost_peer(self) -> bool:
        return LOST_PEER.search(self.message) is not None

    @property
    def summary(self) -> str:
        first_line = re.sub(
            r" at 0x[0-9a-f]+", "", self.message.strip().partition("\n")[0]
        )  # else no two would be equal
        return f"{self.name}: {first_line}" if first_line else self.name


class RankError(RuntimeError):
    """A call on the pool failed. ``str()`` tells the whole story.

    Attributes:
        kind: "error" (a rank raised), "died" (a process ended) or "timeout" (the call was cut).
        rank: the rank to blame; None for a timeout.
        failure: the blamed rank's exception, with its traceback as text (kind "error").
        also: other ranks that raised the same exception themselves.
        waiting: rank -> what each other rank was doing: "finished", or the line at which it waited.
        restarted: the processes had to be replaced, so that the variables on the ranks are gone.
    """

    def __init__(
        self,
        kind: str,
        rank: int | None,
        headline: str,
        waiting: dict[int, str],
        failure: Failure | None = None,
        also: tuple[int, ...] = (),
        restarted: bool = False,
    ) -> None:
        self.kind, self.rank, self.headline, self.failure = kind, rank, headline, failure
        self.waiting, self.also, self.restarted = waiting, also, restarted
        super().__init__(self.describe())

    def describe(self, with_traceback: bool = True) -> str:
        lines = [self.headline]
        if self.failure is not None:
            lines += (
                [self.failure.traceback.rstrip()] if with_traceback else [f"  {step}" for step in self.failure.steps]
            )
        if self.waiting:
            lines.append("Where the other ranks were:" if self.rank is not None else "Where the ranks were:")
            lines += where_table(self.waiting)
        if self.restarted:
            lines.append("The ranks were started again: their variables are gone.")
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: where it happened on the rank, rather than where the notebook waited for it."""
        return self.describe(with_traceback=False).splitlines()


def where_table(waiting: dict[int, str]) -> list[str]:
    """One line for each set of ranks that were at the same place: ``  ranks 0-1, 3  waiting at step.py:12, in f: x.sum()``."""
    places: dict[str, list[int]] = {}
    for rank, place in sorted(waiting.items()):
        places.setdefault(place, []).append(rank)
    labels = {place: f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}" for place, ranks in places.items()}
    width = max(map(len, labels.values()))
    return [f"  {label:<{width}}  {place}" for place, label in labels.items()]


def spans(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass
class Story:
    """What the parent learned while a call fell apart; :meth:`verdict` turns it into a RankError."""

    timeout: float | None = None  # set when the call was cut
    failures: dict[int, Failure] = field(default_factory=dict)
    died: dict[int, int | None] = field(default_factory=dict)  # rank -> exit code
    waiting: dict[int, str] = field(default_factory=dict)
    restarted: bool = False

    def verdict(self) -> RankError:
        in_order = sorted(self.failures.values(), key=lambda f: f.when)
        own = [f for f in in_order if not f.lost_peer]
        if not own and self.died:
            return self._death()
        if not in_order:
            headline = (
                f"no end after {self.timeout:g} s: the call was cut" if self.timeout is not None else "interrupted"
            )
            return RankError("timeout", None, headline, self._others([]), restarted=self.restarted)
        first = (own or in_order)[0]
        # The same exception at the same line is one mistake; which of its ranks came first is chance: the lowest speaks.
        same = sorted(
            (
                f
                for f in (own or in_order)
                if (f.name, f.line or f.summary) == (first.name, first.line or first.summary)
            ),
            key=lambda f: f.rank,
        )
        blamed, also = same[0], tuple(f.rank for f in same[1:])
        who = f"rank {blamed.rank}" if not also else f"ranks {spans([blamed.rank, *also])}"
        return RankError(
            "error",
            blamed.rank,
            f"{who}: {blamed.summary}",
            self._others([blamed.rank, *also]),
            failure=blamed,
            also=also,
            restarted=self.restarted,
        )

    def _death(self) -> RankError:
        rank = min(self.died)
        headline = f"rank {rank} died: {exit_reason(self.died[rank])}"
        return RankError("died", rank, headline, self._others([rank]), restarted=self.restarted)

    def _others(self, blamed: list[int]) -> dict[int, str]:
        told = dict(self.waiting)
        for rank, failure in self.failures.items():
            at = f" at {failure.line}" if failure.line else ""
            # A lost connection says only that the rank waited for one that is gone.
            told[rank] = f"waiting{at}" if failure.lost_peer else f"failed too{at}: {failure.summary}"
        for rank, code in self.died.items():
            told[rank] = f"died: {exit_reason(code)}"
        return {rank: place for rank, place in sorted(told.items()) if rank not in blamed}


def exit_reason(code: int | None) -> str:
    """-9 -> "killed by SIGKILL"; 3 -> "exit code 3"."""
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return "its process ended" if code is None else f"exit code {code}"
