"""Activation memory: Korthikanti's equations 1 to 6, its extras and Table 2; Narayanan's checkpoints; the numbers of notebook 11."""

import pytest

from minimeg.cost import (
    GPTShape,
    activation_bytes_per_layer,
    attention_core_ratio,
    best_checkpoints,
    checkpoint_footprint,
    checkpointed_every,
    extra_activation_bytes,
    first_stage_activation_bytes,
    in_flight,
    interleaving_memory_factor,
    model,
    output_tensor_bytes,
    selective_saving,
)
from minimeg.schedule import build, interleaved, one_f_one_b, prove, simulate

from .oracles import PAPERS, cases, inputs

# Table 2's rows: with t ranks or one, with sequence parallelism or without, what is recomputed.
WAYS = {
    "none": (1, False, "none"),
    "tp": (8, False, "none"),
    "tpsp": (8, True, "none"),
    "tpsel": (8, False, "selective"),
    "tpspsel": (8, True, "selective"),
    "full": (8, False, "full"),
}
NAMES = {"22B": "22b", "530B": "530b", "1T": "1t", "gpt3": "gpt3-175b", "mtnlg": "530b"}


@pytest.mark.parametrize("test", [t for t in cases("K1") if isinstance(t["inputs"], dict)], ids=inputs)
def test_k1_bytes_per_layer(test):
    i = test["inputs"]
    shape = model(NAMES[i["model"]]).shape
    assert (shape.sequence, shape.hidden, shape.heads) == (i["s"], i["h"], i["a"])
    for name, (tensor, sequence_parallel, recompute) in WAYS.items():
        found = activation_bytes_per_layer(shape, i["b"], tensor, sequence_parallel, recompute)
        assert found == test["expected"][name], name
        assert isinstance(found, int)


def test_k1_ratio_and_saving():
    ratio, saving = (t for t in cases("K1") if isinstance(t["inputs"], str))
    assert attention_core_ratio(model("530b").shape) == ratio["expected"]
    for name, expected in saving["expected"].items():
        assert selective_saving(model(NAMES[name]).shape) == pytest.approx(expected, abs=saving["tol"])


def test_k1_full_keeps_the_whole_input_unless_the_sequence_is_split():
    shape = model("22b").shape
    sbh = 2048 * 4 * 6144
    assert activation_bytes_per_layer(shape, 4, 8, False, "full") == 2 * sbh
    assert activation_bytes_per_layer(shape, 4, 8, True, "full") == 2 * sbh // 8


def test_k1_selective_drops_the_core_and_nothing_else():
    for name, tensor in (("22b", 8), ("gpt3-175b", 4)):
        shape = model(name).shape
        for sequence_parallel in (False, True):
            none, selective = (
                activation_bytes_per_layer(shape, 2, tensor, sequence_parallel, recompute)
                for recompute in ("none", "selective")
            )
            assert none - selective == 5 * shape.heads * shape.sequence**2 * 2 // tensor


def test_refusals():
    with pytest.raises(
        ValueError, match=r"microbatch=0 .*\n.*tensor=7 does not divide hidden.*\n.*heads.*\n.*recompute='no'"
    ):
        activation_bytes_per_layer(model("22b").shape, 0, 7, recompute="no")


# ---- K2: a whole stage -------------------------------------------------------------------------------------------------------


def test_k2_interleaving():
    for test in cases("K2")[:2]:
        i = test["inputs"]  # the paper's m are chunks a rank
        assert interleaving_memory_factor(i["p"], i["m"]) == pytest.approx(test["expected"], abs=test["tol"])
    assert interleaving_memory_factor(8, 1) == 1  # plain 1F1B, not 1 + (p - 1)/p


def test_k2_equation_5():
    expected = [t["expected"] for t in cases("K2")[2:5]]
    found = [
        first_stage_activation_bytes(model(name).shape, b, 8) for name, b in (("22b", 4), ("gpt3-175b", 1), ("530b", 1))
    ]
    assert found == expected


def test_k2_the_extras_of_22b_are_half_a_percent():
    (test,) = [t for t in cases("K2") if "ratio" in str(t["inputs"])]
    shape = model("22b").shape
    ratio = extra_activation_bytes(shape, 4, 8) / first_stage_activation_bytes(shape, 4, 8)
    assert ratio == pytest.approx(test["expected"], abs=test["tol"])
    assert ratio > 50 * 0.0001  # "less than 0.01 %" is off by its % sign


def test_k2_the_extras_term_by_term():
    shape = model("530b").shape
    sb, h, v = 2048, 20480, 51200
    assert extra_activation_bytes(shape, 1, 8, pipeline=35) == 35 * sb * h // 8
    assert extra_activation_bytes(shape, 1, 8) == (sb * h + 2 * sb * h + 2 * sb * h + 4 * sb * v) // 8


def test_k2_output_tensors():
    assert output_tensor_bytes(model("530b").shape, 1, 35) == 2_936_012_800
    assert round(2_936_012_800 / 2**30, 2) == 2.73  # "GB" in appendix B is GiB
    assert "GiB" in PAPERS["K2"]["traps"][1]


def test_k2_in_flight_is_what_the_schedules_hold():
    """The closed form, for every rank, against the proof and the simulation."""
    for p in range(1, 9):
        for m in (1, 2, 3, p, 2 * p, 4 * p + 1):
            expected = tuple(in_flight(p, r, m) for r in range(p))
            assert prove(one_f_one_b(p, m)).peak_in_flight == expected
        for n in (2, 3, 4):
            for m in (p, 2 * p, 5 * p) if p > 1 else ():
                expected = tuple(in_flight(p, r, m, n) for r in range(p))
                assert simulate(interleaved(p, m, n)).peak_in_flight == expected


def test_k2_the_first_stage_of_the_closed_form_is_in_flight_times_layers():
    shape = GPTShape(layers=24, hidden=64, heads=4, sequence=64)
    for p, n, m in ((1, 1, 8), (4, 1, 8), (8, 1, 8), (4, 2, 8), (4, 3, 12), (2, 6, 8)):
        layer = activation_bytes_per_layer(shape, 2, 2, True)
        held = simulate(build("interleaved" if n > 1 else "1f1b", p, m, n)).peak_in_flight[0]
        found = first_stage_activation_bytes(shape, 2, 2, True, "none", p, n)
        assert found == pytest.approx(held * 24 // (p * n) * layer)


# ---- N8: checkpoints ---------------------------------------------------------------------------------------------------------


def test_n8_checkpoints():
    (test,) = [t for t in cases("N8") if "A_int" in t["inputs"]]
    i = test["inputs"]
    best = best_checkpoints(i["l"], i["A_in"], i["A_int"])
    assert best == test["expected_c"]
    assert checkpoint_footprint(i["l"], best, i["A_in"], i["A_int"]) == test["expected_footprint"]
    for other in (best - 1, best + 1):
        assert checkpoint_footprint(i["l"], other, i["A_in"], i["A_int"]) > test["expected_footprint"]


# ---- COURSE 11, with s = h = 64, a = 4, b = 2: 5as/h = 20 --------------------------------------------------------------------

SQUARE, SBH = GPTShape(16, 64, 4, sequence=64), 64 * 2 * 64


@pytest.mark.parametrize(("recompute", "units"), [("none", 54), ("selective", 34), ("full", 2)])
def test_course_11_54_34_2(recompute, units):
    assert activation_bytes_per_layer(SQUARE, 2, recompute=recompute) == units * SBH


def test_course_11_the_first_stage_holds_864_whatever_p_is():
    for p in (1, 2, 4, 8, 16):
        in_units = in_flight(p, 0, microbatches=16) * 16 // p * 54
        assert in_units == 864 == first_stage_activation_bytes(SQUARE, 2, pipeline=p) / SBH
        assert in_flight(p, p - 1, microbatches=16) * 16 // p * 54 == 864 // p
    assert first_stage_activation_bytes(SQUARE, 2, pipeline=4, chunks=2) / SBH == 1188
    assert max(simulate(build("gpipe", 4, 8)).peak_in_flight) * 16 // 4 * 54 == 1728


@pytest.mark.parametrize(("every", "units"), [(1, 86), (2, 124), (4, 224), (8, 436), (16, 866)])
def test_course_11_a_checkpoint_every_k_layers(every, units):
    assert checkpointed_every(SQUARE, 2, every) == units * SBH
    assert checkpoint_footprint(16, 16 / every, 2, 54) == units  # the closed form is the same where k divides L


def test_course_11_the_folklore_of_the_square_root_loses():
    best = best_checkpoints(16, 2, 54)
    assert best == pytest.approx(432**0.5)
    assert best > 16  # every layer, not every fourth
    assert min((1, 2, 4, 8, 16), key=lambda every: checkpointed_every(SQUARE, 2, every)) == 1


def test_course_05_sequence_parallelism():
    for tensor, without, with_it in ((4, 21, 13.5), (2, 32, 27)):
        assert activation_bytes_per_layer(SQUARE, 2, tensor) == without * SBH
        assert activation_bytes_per_layer(SQUARE, 2, tensor, True) == with_it * SBH
