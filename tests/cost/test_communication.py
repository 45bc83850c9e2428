"""Communication: volumes of Narayanan, collectives of Shoeybi and Korthikanti, cost of a collective; COURSE 01's 16 : 1 : 12."""

from fractions import Fraction

import pytest

from minimeg.cost import (
    GPTShape,
    collective_seconds,
    cross_entropy_elements,
    data_parallel_elements,
    layer_collectives,
    matrix_parameters,
    model,
    model_collectives,
    pipeline_elements,
    pipeline_message_elements,
    tensor_parallel_elements,
    wire_factor,
)
from minimeg.grid import Grid

from .oracles import cases


def test_n7_volumes():
    (test,) = cases("N7")
    i, shape = test["inputs"], model("gpt3-175b").shape
    assert (shape.sequence, shape.hidden) == (i["s"], i["h"])
    elements = tensor_parallel_elements(shape, i["b"], i["t"])
    assert elements == test["expected_tp_elems"]
    assert 2 * elements == test["expected_tp_bytes_fp16"]
    assert pipeline_message_elements(shape, i["b"]) == test["expected_pp_elems"]
    assert pipeline_message_elements(shape, i["b"], i["t"]) == test["expected_pp_scatter_gather_elems"]


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_volumes_of_tensor_parallelism(tensor):
    shape, bsh = GPTShape(4, 64, 8, sequence=16), 3 * 16 * 64
    share = Fraction(tensor - 1, tensor)
    for sequence_parallel in (False, True):
        assert tensor_parallel_elements(shape, 3, tensor, sequence_parallel) == 8 * bsh * share
        assert tensor_parallel_elements(shape, 3, tensor, sequence_parallel, "selective") == 8 * bsh * share
        assert tensor_parallel_elements(shape, 3, tensor, sequence_parallel, "full") == 12 * bsh * share
    assert tensor_parallel_elements(shape, 3, tensor, True, regather=True) == 10 * bsh * share
    assert tensor_parallel_elements(shape, 3, tensor, False, regather=True) == 8 * bsh * share


def test_course_05_512_and_640():
    shape = GPTShape(1, 16, 4, sequence=8)
    for tensor, without, with_it in ((2, 512, 640), (4, 768, 960)):
        assert tensor_parallel_elements(shape, 1, tensor) == without
        assert tensor_parallel_elements(shape, 1, tensor, True, regather=True) == with_it


def test_s2_collectives_per_layer():
    (count, _) = cases("S2")
    passes = layer_collectives()
    assert [passes["forward"], passes["backward"]] == [{"all_reduce": n} for n in count["expected"]]
    assert layer_collectives(recompute="full")["backward"] == {"all_reduce": 4}
    assert model_collectives()["embedding"] == 1


def test_s2_data_parallel_group_of_figure_8():
    (_, groups) = cases("S2")
    assert [rank + 1 for rank in Grid(512, tp=8).groups("dp")[0]] == groups["expected"]


def test_s2_cross_entropy_sends_three_numbers_a_token():
    shape = GPTShape(1, 16, 4, sequence=2048, vocabulary=51200)
    assert cross_entropy_elements(shape, 4) == 3 * 4 * 2048
    # COURSE 04: gathering fp32 logits at t = 4 sends 153,600 bytes a token, three reductions 18: 8,533 : 1.
    gathered = 4 * float(wire_factor("all_gather", 4)) * 51200
    reduced = 4 * float(wire_factor("all_reduce", 4)) * cross_entropy_elements(shape, 1) / 2048
    assert (gathered, reduced, round(gathered / reduced)) == (153_600, 18, 8533)


def test_k6_sequence_parallelism_has_the_same_volume():
    (test,) = cases("K6")
    passes = layer_collectives(sequence_parallel=True)
    assert passes == {"forward": test["expected"]["fwd"], "backward": test["expected"]["bwd"]}
    assert layer_collectives(sequence_parallel=True, regather=True)["backward"]["all_gather"] == 4
    assert wire_factor("all_reduce", 8) == wire_factor("all_gather", 8) + wire_factor("reduce_scatter", 8)


def test_course_01_16_to_1_to_12():
    """tp=2 pp=4 dp=2 on 16 GPUs: bytes that a rank sends per step."""
    shape, gib = GPTShape(32, 4096, 32, sequence=2048), 2**30
    m, t, p, d = 8, 2, 4, 2
    tensor = 2 * tensor_parallel_elements(shape, 1, t) * (shape.layers // p) * m
    pipeline = 2 * pipeline_elements(shape, 1, m)
    data = 4 * data_parallel_elements(matrix_parameters(shape) / (t * p), d)
    assert (tensor / gib, pipeline / gib, data / gib) == (4, 1 / 4, 3)
    assert (tensor // pipeline, pipeline // pipeline, data // pipeline) == (16, 1, 12)


def test_interleaving_multiplies_messages():
    shape = GPTShape(32, 4096, 32)
    assert pipeline_elements(shape, 1, 8, tensor=2, chunks=4) == 4 * pipeline_elements(shape, 1, 8, tensor=2)


def test_data_parallel():
    assert data_parallel_elements(1000, 1) == 0
    assert data_parallel_elements(1000, 4) == 1500


# ---- C1 ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", cases("C1"), ids=lambda t: t["inputs"]["op"])
def test_c1_seconds(test):
    i = test["inputs"]
    found = collective_seconds(i["op"], i["S"], i["n"], i["B"])
    assert found == pytest.approx(test["expected_s"], rel=1e-12)


def test_c1_factors():
    factors = {
        "all_reduce": Fraction(3, 2),
        "reduce_scatter": Fraction(3, 4),
        "all_gather": Fraction(3, 4),
        "all_to_all": Fraction(3, 4),
        "broadcast": 1,
        "reduce": 1,
    }
    assert {name: wire_factor(name, 4) for name in factors} == factors
    assert {wire_factor(name, 1) for name in factors} == {0}


def test_c1_latency():
    assert collective_seconds("all_reduce", 0, 4, 1e9, latency=1) == 6
    assert collective_seconds("all_gather", 0, 4, 1e9, latency=1) == 3


def test_refusals():
    with pytest.raises(ValueError, match=r"ranks=0 .*\n.*operation='gossip' is unknown; use one of all_reduce"):
        wire_factor("gossip", 0)
    with pytest.raises(ValueError, match="bandwidth=0 must be above 0"):
        collective_seconds("all_reduce", 1, 2, 0)
