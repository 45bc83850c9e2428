"""The pool of ranks: results in order, failures explained, nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from minimeg.lab.ranks import RankError


def total(add: float = 0.0) -> float:
    x = torch.tensor([dist.get_rank() + 1.0 + add])
    dist.all_reduce(x)
    return x.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"boom on {rank}")
    total()


def test_results_come_in_rank_order(ranks):
    assert ranks(4, dist.get_rank) == [0, 1, 2, 3]
    assert ranks(4, total) == [10.0] * 4
    assert ranks(4, total, add=1.0) == [14.0] * 4


def test_the_failing_rank_is_reported_and_the_pool_goes_on(ranks):
    for rank in range(4):
        with pytest.raises(RankError) as caught:
            ranks(4, fail_on, rank)
        assert caught.value.rank == rank
        assert f"boom on {rank}" in str(caught.value)
        assert all("in total" in place for place in caught.value.waiting.values())
        assert ranks(4, total) == [10.0] * 4
