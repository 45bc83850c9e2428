"""A pytest plugin for ``make nbval``: how long each notebook took, and failure if one took more than a minute.

A minute on the two cores of the smallest machine that CI runs on; several times what they need.
"""

from __future__ import annotations

from collections import defaultdict

LIMIT = 60.0


class Clock:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report) -> None:
        if report.nodeid.partition("::")[0].endswith(".ipynb"):
            self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session) -> None:
        if max(self.seconds.values(), default=0) > LIMIT and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for name, seconds in self.seconds.items():
            note = f"   over the limit of {LIMIT:g} s" if seconds > LIMIT else ""
            terminalreporter.write_line(f"{name:<48} {seconds:5.1f} s{note}")
        total = sum(self.seconds.values())
        terminalreporter.write_line(f"{len(self.seconds)} notebooks, {total:.0f} s")


def pytest_configure(config) -> None:
    config.pluginmanager.register(Clock(), "notebook-clock")
