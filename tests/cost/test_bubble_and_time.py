"""Bubble, time of a batch, days of training; each bubble also as a simulation finds it."""

import pytest

from minimeg.cost import (
    GPTShape,
    aggregate_petaflops,
    batch_seconds,
    bubble_of_data_parallel,
    bubble_of_ideal,
    bubble_of_total,
    bubble_seconds,
    model,
    parameters,
    percent_of_peak,
    scaling_efficiency,
    training_days,
    training_days_exact,
)
from minimeg.schedule import build, one_f_one_b, simulate

from .oracles import PAPERS, cases, inputs, rows


@pytest.mark.parametrize("test", [t for t in cases("N6") if "p" in t["inputs"]], ids=inputs)
def test_n6_bubble(test):
    p, m, n = (test["inputs"][name] for name in ("p", "m", "v"))
    assert bubble_of_ideal(p, m, n) == pytest.approx(test["expected"], abs=test["tol"])


def test_n6_with_data_parallelism():
    (test,) = [t for t in cases("N6") if "n" in t["inputs"]]
    i = test["inputs"]
    assert bubble_of_data_parallel(i["n"], i["d"], i["bprime"]) == pytest.approx(test["expected"], abs=test["tol"])
    assert bubble_of_data_parallel(i["n"], i["d"], i["bprime"]) == bubble_of_ideal(
        i["n"] // i["d"], i["bprime"] // i["d"]
    )


@pytest.mark.parametrize(("p", "m", "n"), [(1, 4, 1), (4, 8, 1), (4, 8, 2), (8, 24, 3), (5, 3, 1), (2, 2, 4)])
def test_n6_a_simulation_agrees(p, m, n):
    timeline = simulate(build("interleaved" if n > 1 else "1f1b", p, m, n), 1, 2)
    assert timeline.bubble_of_ideal == pytest.approx(bubble_of_ideal(p, m, n))
    assert timeline.bubble_of_total == pytest.approx(bubble_of_total(p, m, n))
    assert timeline.makespan - 3 * m == pytest.approx(bubble_seconds(p, 1, 2, n))


def test_n6_of_total_is_gpipes():
    assert bubble_of_total(4, 8) == pytest.approx((4 - 1) / (8 + 4 - 1))


def test_course_06_micro_batches_for_a_bubble_of_a_tenth():
    for p, m in ((2, 10), (4, 30), (8, 70)):
        assert bubble_of_ideal(p, m) == pytest.approx(0.1)
        assert bubble_of_ideal(p, m - 1) > 0.1


def test_n8_time_of_a_batch():
    (test,) = [t for t in cases("N8") if "bprime" in t["inputs"]]
    i = test["inputs"]
    assert batch_seconds(i["bprime"], i["b"], i["p"], i["tf"], i["tb"]) == test["expected"]
    assert simulate(one_f_one_b(i["p"], i["bprime"] // i["b"]), i["tf"], i["tb"]).makespan == test["expected"]


def test_refusals():
    with pytest.raises(ValueError, match=r"pipeline=0 .*\n.*microbatches=0 "):
        bubble_of_ideal(0, 0)
    with pytest.raises(ValueError, match="microbatch=3 does not divide batch_per_replica=32"):
        batch_seconds(32, 3, 8, 1, 2)


# ---- days --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", cases("N4"), ids=inputs)
def test_n4_equation_4(test):
    i = test["inputs"]
    days = training_days(i["T"], i["P"], i["n"], i["X"])
    assert days == pytest.approx(test["expected"], abs=test["tol"])
    assert f"{days:.0f} (rounded)" == test["paper"]


def test_n4_a_trillion_is_1008_billion():
    assert round(training_days(450e9, 1.0e12, 3072, 163e12)) == 83
    assert round(training_days(450e9, parameters(model("1t").shape), 3072, 163e12)) == 84


def test_n4_the_exact_route_is_longer():
    assert training_days_exact(model("gpt3-175b").shape, 300e9, 1024, 140e12) == pytest.approx(34.73, abs=5e-3)
    assert training_days_exact(model("1t").shape, 450e9, 3072, 163e12) == pytest.approx(84.96, abs=5e-3)


@pytest.mark.parametrize("row", rows("N5"), ids=lambda row: f"{row['scheme']}-{row['params_b']}-{row['gpus']}")
def test_n5_table_2(row):
    shape = GPTShape(row["l"], row["h"], 1)
    assert round(parameters(shape) / 1e9, 1) == row["params_b"]
    days = training_days_exact(shape, 300e9, row["gpus"], row["tflops_per_gpu"] * 1e12)
    assert days == pytest.approx(row["days_eq3_derived"], rel=1e-3)
    assert days == pytest.approx(row["days_for_300B"], rel=0.0125)


@pytest.mark.parametrize("test", cases("N5"), ids=inputs)
def test_n5_the_tests_of_the_extract(test):
    i = test["inputs"]
    days = training_days_exact(GPTShape(i["l"], i["h"], 1), i["T"], i["n"], i["X"])
    assert days == pytest.approx(test["expected"], abs=1e-3)


def test_n5_equation_4_is_low_on_table_2():
    assert round(training_days(300e9, 174.6e9, 384, 144e12), 1) == 87.7
    for row in rows("N5"):
        short = training_days(300e9, row["params_b"] * 1e9, row["gpus"], row["tflops_per_gpu"] * 1e12)
        assert 0.97 < short / row["days_eq3_derived"] < 0.99


# ---- Table 1 against itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "row"), list(zip(cases("N3"), rows("N1"), strict=True)), ids=lambda x: str(x.get("inputs", ""))
)
def test_n3_percent_of_peak(test, row):
    assert test["inputs"]["X"] == row["tflops_per_gpu"]
    assert percent_of_peak(test["inputs"]["X"] * 1e12, 312e12) == test["expected_pct"] == row["pct_peak"]
    assert aggregate_petaflops(row["tflops_per_gpu"] * 1e12, row["gpus"]) == pytest.approx(row["agg_pflops"], rel=5e-3)


def test_s1_scaling_of_512_gpus():
    (test,) = [t for t in cases("S1") if isinstance(t["inputs"], str)]
    assert scaling_efficiency(15.1e15, 512, 39e12) == pytest.approx(test["expected"], abs=test["tol"])
    assert percent_of_peak(39e12, 130e12) == 30
    assert PAPERS["S1"]["data"]["rows"][-1]["weak_eff_mp_dp_pct"] == 74  # another definition in the same paper
