"""The minimal model ranks as Figures 13, 14 and 15 of Narayanan et al. 2021 do, and breaks where it is said to break."""

from itertools import pairwise

import pytest

from minimeg.cost import model
from minimeg.cost.minimal import A100_CLUSTER, Cluster, iteration_seconds

from .oracles import PAPERS, cases

SHAPE_162B, SHAPE_6B = model("162b").shape, model("5.9b").shape
GB = 1e9


def figure_13(batch, between):
    """Seconds by (p, t) with 64 GPUs; the extract's numbers use one speed between nodes for all-reduces and for messages."""
    cluster = Cluster(between=between * GB, adapter=between * GB)
    return {
        (p, 64 // p): iteration_seconds(SHAPE_162B, 64 // p, p, 1, batch, cluster=cluster) for p in (2, 4, 8, 16, 32)
    }


@pytest.mark.parametrize("batch", [32, 128])
@pytest.mark.parametrize("between", [25, 50, 100])
def test_c3_figure_13(between, batch):
    (test,) = cases("C3")
    seconds = figure_13(batch, between)
    assert list(min(seconds, key=seconds.get)) == test["expected_best"]


@pytest.mark.parametrize("case", list(PAPERS["C3"]["data"].items()), ids=lambda case: case[0])
def test_c3_every_number_of_the_minimal_model(case):
    name, expected = case
    between, batch = (int(part[2 if part.startswith("ib") else 1 :]) for part in name.split("_"))
    seconds = figure_13(batch, between)
    assert {f"p{p}t{t}": round(x, 2) for (p, t), x in seconds.items()} == expected["seconds"]
    assert list(min(seconds, key=seconds.get)) == expected["best_p_t"]


@pytest.mark.parametrize("batch", [32, 128])
def test_c3_the_default(batch):
    seconds = {(p, 64 // p): iteration_seconds(SHAPE_162B, 64 // p, p, 1, batch) for p in (2, 4, 8, 16, 32)}
    assert min(seconds, key=seconds.get) == (8, 8)


def test_c3_perfect_use_of_eight_adapters_turns_the_order():
    seconds = figure_13(32, 200)
    assert min(seconds, key=seconds.get) == (4, 16)
    assert A100_CLUSTER.between == 100 * GB


def figure_14(batch, data):
    cluster = Cluster(data=data * GB)
    return [iteration_seconds(SHAPE_6B, 1, p, 64 // p, batch, cluster=cluster) for p in (2, 4, 8, 16, 32)]


@pytest.mark.parametrize("batch", [32, 128, 512])
@pytest.mark.parametrize("data", [50, 100, 200])
def test_c4_figure_14(data, batch):
    assert all(faster < slower for faster, slower in pairwise(figure_14(batch, data)))


def test_c4_a_slow_all_reduce_breaks_the_order():
    assert not all(faster < slower for faster, slower in pairwise(figure_14(32, 25)))


@pytest.mark.parametrize("batch", [32, 64, 128, 512, 1024])
def test_c5_figure_15_the_border_of_a_node(batch):
    cluster = Cluster(between=25 * GB)
    inside, outside = (iteration_seconds(SHAPE_6B, t, 1, 64 // t, batch, cluster=cluster) for t in (8, 16))
    assert outside > 2 * inside


def test_c5_falling_with_t_at_every_batch_is_not_what_the_model_says():
    two, four, eight = (iteration_seconds(SHAPE_6B, t, 1, 64 // t, 32) for t in (2, 4, 8))
    assert not two < four < eight


def test_refusals():
    with pytest.raises(ValueError, match="batch=30 is not a multiple of data x microbatch = 32"):
        iteration_seconds(SHAPE_6B, 1, 2, 32, 30)
    with pytest.raises(ValueError, match=r"tensor=0 .*\n.*data=0 "):
        iteration_seconds(SHAPE_6B, 0, 2, 0, 32)
