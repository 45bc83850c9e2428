"""Bytes per parameter: ZeRO's Table 1, Megatron-Core's table, and ZeRO's communication."""

import math

import pytest

from minimeg.cost import megatron_bytes_per_parameter, zero_bytes, zero_communication
from minimeg.cost.optimizer import PRECISIONS

from .oracles import PAPERS, cases, inputs

GB = 1e9


@pytest.mark.parametrize("test", cases("R1"), ids=inputs)
def test_r1_zero(test):
    i = test["inputs"]
    found = [zero_bytes(i["psi_billion"] * GB, i["Nd"], stage) / GB for stage in (1, 2, 3)]
    assert found == pytest.approx(test["expected_exact_GB"], abs=1e-6)
    assert found == pytest.approx(test["paper"], abs=1)


def test_r1_the_whole_table_is_within_a_gigabyte():
    for name, row in PAPERS["R1"]["data"]["table1"].items():
        psi = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[name]
        for data, printed in row.items():
            found = [zero_bytes(psi, int(data), stage) / GB for stage in (1, 2, 3)]
            assert found == pytest.approx(printed, abs=1)


def test_r1_large_values_are_cut_off_not_rounded():
    for psi, data, stage, printed in ((1e12, 64, 1, 4187), (1e12, 256, 2, 2054), (128e9, 1024, 1, 513)):
        exact = zero_bytes(psi, data, stage) / GB
        assert math.floor(exact) == printed != exact
    assert zero_bytes(7.5e9, 64, 3) / GB == 1.875


def test_r1_stage_0_is_plain_data_parallelism():
    assert zero_bytes(1.0, 64, 0) == 16
    assert [zero_bytes(1.0, 1, stage) for stage in (1, 2, 3)] == [16, 16, 16]
    assert zero_bytes(1.0, 1, 0, optimizer_bytes=8) == 12


def test_r2_communication():
    (test,) = cases("R2")
    assert [zero_communication(stage) for stage in (0, 1, 2, 3)] == test["expected"]


@pytest.mark.parametrize("test", cases("R3"), ids=inputs)
def test_r3_megatron_core(test):
    for precision, expected in test["expected"].items():
        assert megatron_bytes_per_parameter(precision, test["inputs"]["d"]) == expected
    assert set(test["expected"]) == set(PRECISIONS)


def test_r3_without_the_distributed_optimizer_d_does_not_matter():
    for precision, whole in (("fp16_fp16", 20), ("bf16_fp32", 18), ("fp32_fp32", 16)):
        assert megatron_bytes_per_parameter(precision, 64, distributed=False) == whole


def test_refusals():
    with pytest.raises(ValueError, match=r"data=0 .*\n.*stage=4 must be 0, 1, 2 or 3"):
        zero_bytes(1.0, 0, 4)
    with pytest.raises(ValueError, match="stage=-1"):
        zero_communication(-1)
    with pytest.raises(ValueError, match="precision='fp8' is unknown; use one of fp16_fp16, bf16_fp32, fp32_fp32"):
        megatron_bytes_per_parameter("fp8")
