"""Fixtures that all tests share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minimeg.lab.ranks import Ranks

# ---- ranks: real processes, shared by the whole session ----------------------------------------------------------------------


class SharedRanks:
    """One pool for each number of ranks that a test asks for, started when first needed and kept until the session ends."""

    def __init__(self) -> None:
        self.pools: dict[int, Ranks] = {}

    def pool(self, n: int) -> Ranks:
        if n not in self.pools:
            self.pools[n] = Ranks(n, device="cpu", preload=["pytest"])
        return self.pools[n]

    def __call__(
        self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[Any]:
        """``function(*args, **kwargs)`` on n ranks -> results in rank order. A warning on a rank is an error, as in pytest."""
        return self.pool(n).call(_strictly, function, *args, timeout=timeout, **kwargs)

    def each(
        self, function: Callable[..., Any], per_rank_args: list[tuple[Any, ...]], timeout: float = 60
    ) -> list[Any]:
        """Rank r calls ``function(*per_rank_args[r])``."""
        pool = self.pool(len(per_rank_args))
        return pool.map(_strictly, [(function, *args) for args in per_rank_args], timeout=timeout)


def _strictly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **kwargs)


_SHARED = SharedRanks()


@pytest.fixture(scope="session")
def ranks() -> Iterator[SharedRanks]:
    """``ranks(n, function, *args)``: the function, from the top level of the test's module, runs on n real ranks."""
    yield _SHARED
    for pool in _SHARED.pools.values():
        pool.close()


@pytest.fixture(scope="session")
def run_on_ranks(ranks: SharedRanks) -> SharedRanks:
    """The same under the name that reads well in a test: ``run_on_ranks(4, function, *args)``."""
    return ranks


@pytest.fixture(scope="module", autouse=True)
def _fresh_groups() -> Iterator[None]:
    """Process groups that a module's functions made are gone before the next module's first call."""
    yield
    for pool in _SHARED.pools.values():
        pool.leave_groups()
