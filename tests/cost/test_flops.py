"""FLOPs: Narayanan's equation 3, Korthikanti's equations 7 and 8 with Table 5, and the count that equation 8 misses."""

import re

import pytest

from minimeg.cost import (
    GPTShape,
    attention_core_share,
    flops_per_iteration,
    hardware_flops_as_published,
    hardware_flops_per_iteration,
    model,
    model_flops_per_iteration,
    recompute_overhead,
    utilisation,
)

from .oracles import PAPERS, cases, inputs, rows

PEAK = 312e12


@pytest.mark.parametrize("test", cases("N2"), ids=inputs)
def test_n2_equation_3(test):
    i = test["inputs"]
    shape = GPTShape(i["l"], i["h"], 1, i["s"], i["V"])
    assert flops_per_iteration(shape, i["B"]) == pytest.approx(test["expected"], rel=1e-12)
    printed = (
        96 * i["B"] * i["s"] * i["l"] * i["h"] ** 2 * (1 + i["s"] / (6 * i["h"]) + i["V"] / (16 * i["l"] * i["h"]))
    )
    assert flops_per_iteration(shape, i["B"]) == pytest.approx(printed, rel=1e-12)


@pytest.mark.parametrize("name", ["22b", "gpt3-175b", "530b", "1t"])
def test_k3_equations_7_and_8_as_they_are_printed(name):
    shape = model(name).shape
    length, h, s, v = shape.layers, shape.hidden, shape.sequence, shape.vocabulary
    base, last = 72 * length * s * h**2, v / (12 * h * length)
    assert model_flops_per_iteration(shape, 1) == pytest.approx(base * (1 + s / (6 * h) + last), rel=1e-12)
    assert hardware_flops_as_published(shape, 1) == pytest.approx(base * (1 + s / (3 * h) + last), rel=1e-12)
    counted = hardware_flops_per_iteration(shape, 1, "selective")
    assert counted == pytest.approx(base * (1 + 2 * s / (9 * h) + last), rel=1e-12)


NAMES = {"22B": "22b", "175B": "gpt3-175b", "530B": "530b", "1T": "1t"}


@pytest.mark.parametrize("row", rows("K3"), ids=lambda row: row["model"])
def test_k3_table_5(row):
    shape, batch = model(NAMES[row["model"]]).shape, row["global_batch"]
    assert (shape.heads, shape.hidden, shape.layers) == (row["heads"], row["hidden"], row["layers"])
    flops = model_flops_per_iteration(shape, batch)
    assert flops == pytest.approx(row["model_flops_eq7"], rel=1e-12)

    def percent(count):
        return 100 * utilisation(count, row["iter_present_s"], row["gpus"], PEAK)

    assert percent(flops) == pytest.approx(row["mfu_eq7_derived"], rel=1e-4)
    assert percent(flops) == pytest.approx(row["mfu_pct"], abs=0.2)
    published = percent(hardware_flops_as_published(shape, batch))
    assert published == pytest.approx(row["hfu_eq8_derived"], rel=1e-4)
    assert published == pytest.approx(row["hfu_pct"], abs=0.2)
    counted = percent(hardware_flops_per_iteration(shape, batch, "selective"))
    assert counted == pytest.approx(row["hfu_exact_count_derived"], rel=1e-4)


def test_k3_the_tests_of_the_extract():
    (first, scaled, *increases) = cases("K3")
    shape = model("22b").shape
    mfu = 100 * utilisation(model_flops_per_iteration(shape, 4), 1.10, 8, PEAK)
    hfu = 100 * utilisation(hardware_flops_as_published(shape, 4), 1.10, 8, PEAK)
    assert mfu == pytest.approx(first["expected_mfu"], abs=1e-3)
    assert hfu == pytest.approx(first["expected_hfu_eq8"], abs=1e-3)
    flops = model_flops_per_iteration(model("530b").shape, 2240)
    assert 100 * utilisation(flops, 39.15, 2240, PEAK) == pytest.approx(scaled["expected"], abs=scaled["tol"])
    assert round(100 * utilisation(flops, 39.15, 2240, PEAK), 1) == scaled["paper"]
    assert len(increases) == len(rows("K3"))


@pytest.mark.parametrize(
    ("test", "row"), list(zip(cases("K3")[2:], rows("K3"), strict=True)), ids=lambda x: str(x.get("inputs", ""))
)
def test_k3_the_higher_utilisation_is_the_shorter_time(test, row):
    """Speed at equal model FLOPs: the ratio of two utilisations is the inverse ratio of the times."""
    full, present = map(float, re.fullmatch(r"([\d.]+)/([\d.]+)-1", test["inputs"]).groups())
    assert (full, present) == (row["iter_full_recompute_s"], row["iter_present_s"])
    shape, batch, gpus = model(NAMES[row["model"]]).shape, row["global_batch"], row["gpus"]
    flops = model_flops_per_iteration(shape, batch)
    gain = utilisation(flops, present, gpus, PEAK) / utilisation(flops, full, gpus, PEAK) - 1
    assert gain == pytest.approx(test["expected"], abs=5e-5)
    assert 100 * gain == pytest.approx(float(test["paper"].rstrip("%")), abs=0.1)


def test_k3_the_overhead_that_the_paper_prints_is_three_times_too_big():
    for name, printed in (("gpt3-175b", 2.7), ("530b", 1.6)):
        shape = model(name).shape
        model_flops = model_flops_per_iteration(shape, 1)
        assert round(100 * (hardware_flops_as_published(shape, 1) / model_flops - 1), 1) == printed
        counted = hardware_flops_per_iteration(shape, 1, "selective") - model_flops
        assert hardware_flops_as_published(shape, 1) - model_flops == 3 * counted


def test_k4_overheads_of_table_4():
    (test,) = cases("K4")
    baseline = rows("K4")[0][3]
    for combined, expected, printed in zip(test["inputs"], test["expected"], test["paper"], strict=True):
        # Equal FLOPs, so times compare as utilisations do.
        overhead = 100 * (utilisation(1.0, baseline / 1e3, 1, 1.0) / utilisation(1.0, combined / 1e3, 1, 1.0) - 1)
        assert overhead == pytest.approx(expected, abs=test["tol"])
        assert round(overhead) == printed


# ---- COURSE 11 ---------------------------------------------------------------------------------------------------------------


def test_course_11_what_recomputation_costs():
    square = GPTShape(16, 64, 4, sequence=64)
    assert attention_core_share(square) == 1 / 7
    assert recompute_overhead(square, "selective") == pytest.approx(1 / 21)
    assert recompute_overhead(square, "full") == 1 / 3
    assert recompute_overhead(square, "none") == 0
    assert round(100 * recompute_overhead(model("gpt3-175b").shape, "selective"), 1) == 0.9
    h, s = 12288, 2048
    assert recompute_overhead(model("gpt3-175b").shape, "selective") == pytest.approx(s / (18 * h + 3 * s))


def test_recomputation_of_the_layers_alone():
    """Without the output layer the overhead is that of the FLOPs of an iteration."""
    shape = GPTShape(100, 64, 4, sequence=64, vocabulary=1)
    for recompute in ("selective", "full"):
        ratio = hardware_flops_per_iteration(shape, 1, recompute) / model_flops_per_iteration(shape, 1) - 1
        assert ratio == pytest.approx(recompute_overhead(shape, recompute), rel=1e-3)


def test_the_number_of_passes():
    assert PAPERS["N2"]["assumptions"].startswith("FULL activation recomputation")
    shape = GPTShape(2, 8, 2, 4, 16)
    layer, core, output = 24 * 4 * 8 * 8 + 4 * 4 * 4 * 8, 4 * 4 * 4 * 8, 2 * 4 * 8 * 16
    assert hardware_flops_per_iteration(shape, 3, "none") == 3 * (2 * 3 * layer + 3 * output)
    assert hardware_flops_per_iteration(shape, 3, "selective") == 3 * (2 * (3 * layer + core) + 3 * output)
    assert hardware_flops_per_iteration(shape, 3, "full") == 3 * (2 * 4 * layer + 3 * output)


def test_refusals():
    with pytest.raises(
        ValueError, match=r"batch=0 .*\n.*recompute='some' is unknown; use one of none, selective, full"
    ):
        hardware_flops_per_iteration(model("22b").shape, 0, "some")
