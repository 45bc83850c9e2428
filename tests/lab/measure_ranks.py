"""How long the pool of ranks takes for everything it does: ``python -m tests.lab.measure_ranks [ranks]``.

Medians of several rounds, in seconds; the first line is a cold start, in a process that has not started any ranks before.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

from minimeg.lab.ranks import RankError, Ranks
from tests.lab import test_ranks as on_ranks

ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    with contextlib.suppress(RankError):
        work()
    return time.perf_counter() - started


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    pool = Ranks(n, device="cpu", preload=["tests.lab.test_ranks"])
    table: dict[str, list[float]] = {"cold start, first all-reduce done": [seconds(lambda: pool.call(on_ranks.total))]}

    def note(label: str, work: Callable[[], object]) -> None:
        table.setdefault(label, []).append(seconds(work))

    for _ in range(ROUNDS):
        pool.close()
        note("warm start, first all-reduce done", lambda: pool.call(on_ranks.total))
        note("a call with an all-reduce", lambda: pool.call(on_ranks.total))
        note("reset of the groups", pool.reset)
        note("an error on one rank, reported", lambda: pool.call(on_ranks.fail_on, 1))
        note("  the next call", lambda: pool.call(on_ranks.total))
        note("a hang, timeout 2 s, reported", lambda: pool.call(on_ranks.skip_on, 1, "all_reduce", timeout=2))
        note("  the next call", lambda: pool.call(on_ranks.total))
        note("a hang in a plain receive, timeout 2 s", lambda: pool.call(on_ranks.skip_on, 1, "recv", timeout=2))
        note("  the next call", lambda: pool.call(on_ranks.total))
        note("a rank killed, reported", lambda: pool.call(on_ranks.end_process, 1, "kill"))
        note("  the next call, on new processes", lambda: pool.call(on_ranks.total))
        note("restart", pool.restart)
    print(f"{n} ranks, median of {ROUNDS}")
    for label, times in table.items():
        print(f"{label:<42}{statistics.median(times):8.3f} s   (max {max(times):.3f})")


if __name__ == "__main__":
    main()
