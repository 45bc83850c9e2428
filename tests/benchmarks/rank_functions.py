"""What test_benchmarks.py calls on the ranks, which cannot import a test module."""

from __future__ import annotations

import time

import torch.distributed as dist

from tests.benchmarks import sleeping
from tests.benchmarks.timing import take_turns


def turns(rounds: int) -> tuple[list[str], dict[str, list[float]]]:
    """-> who was called in which order, and the times."""
    seen: list[str] = []
    contenders = {name: lambda name=name: seen.append(name) for name in "ab"}
    prepare = {name: lambda name=name: seen.append(f"prepare {name}") for name in "ab"}
    return seen, take_turns(contenders, rounds, prepare)


def one_is_late() -> dict[str, list[float]]:
    return take_turns({"late": lambda: time.sleep(0.05 * dist.get_rank())}, 1)


class _ReadsOneTwice(sleeping._Hand):
    def step(self) -> None:
        self.batch[1] = self.batch[0]
        super().step()


def forgets_one(setting: sleeping.Setting) -> list[str]:
    """Whose gradients are wrong when one contender misses a micro-batch."""
    sleeping._CONTENDERS["wrong"] = _ReadsOneTwice
    try:
        wrong: list[str] = sleeping.measure(setting, [("1f1b", "ours"), ("1f1b", "wrong")], 1)["wrong"]
        return wrong
    finally:
        del sleeping._CONTENDERS["wrong"]
