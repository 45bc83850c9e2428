"""A pytest plugin for ``make nbval``: how long each notebook took, and failure if one took more than a minute.

A minute on the two cores of the smallest machine that CI runs on; several times what they need. On a machine that is busy with
other things the limit grows with its load.
"""

from __future__ import annotations

import os
from collections import defaultdict

LIMIT = 60.0


def limit() -> float:
    """Seconds that a notebook may take now."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 1.0
    return LIMIT * max(1.0, load / (os.cpu_count() or 1))


class Clock:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report) -> None:
        if report.nodeid.partition("::")[0].endswith(".ipynb"):
            self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session) -> None:
        if max(self.seconds.values(), default=0) > limit() and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for name, seconds in self.seconds.items():
            note = f"   over the limit of {limit():.0f} s" if seconds > limit() else ""
            terminalreporter.write_line(f"{name:<48} {seconds:5.1f} s{note}")
        total = sum(self.seconds.values())
        terminalreporter.write_line(f"{len(self.seconds)} notebooks, {total:.0f} s")


def pytest_configure(config) -> None:
    config.pluginmanager.register(Clock(), "notebook-clock")
