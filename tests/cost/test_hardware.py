"""GPUs: sources, which link a group runs over, and refusals."""

from dataclasses import replace

import pytest

from minimeg.cost import GPUS, gpu

from .oracles import PAPERS, cases

GB = 1e9
A100 = gpu("a100-80g")


@pytest.mark.parametrize(
    ("name", "entry"),
    [("a100-80g", "A100_SXM"), ("h100-80g", "H100_SXM"), ("h200-141g", "H200_SXM"), ("b200-180g", "B200")],
)
def test_c2_data_sheets(name, entry):
    data, one = PAPERS["C2"]["data"][entry], gpu(name)
    assert one.peak == data["bf16_dense_tflops"] * 1e12
    assert one.memory == data["hbm_GB"] * GB
    assert one.memory_bandwidth == data["hbm_TBps"] * 1e12
    assert one.nvlink == next(v for k, v in data.items() if k.startswith("nvlink") and k.endswith("uni_GBps")) * GB
    if "matmul_achievable_tflops" in data:
        assert one.matmul == data["matmul_achievable_tflops"] * 1e12


def test_c2_measured_links_support_the_default_efficiency():
    (test,) = cases("C2")
    found = [235 * GB / A100.nvlink, 396.4 * GB / gpu("h200-141g").nvlink]
    assert found == pytest.approx(test["expected"], abs=test["tol"])
    assert all(abs(one.link_efficiency - found[0]) < 0.02 for one in GPUS.values())


def test_c2_deepseeks_h800():
    one, data = gpu("h800-80g"), PAPERS["C2"]["data"]["deepseek_H800"]
    assert one.nvlink * one.link_efficiency == data["nvlink_GBps"] * GB
    assert one.adapter == data["ib_GBps"] * GB


def test_the_link_of_a_ring():
    one = replace(A100, link_efficiency=1.0)
    assert one.ring_bandwidth(8, 1) == one.ring_bandwidth(2, 4) == 300 * GB  # inside a node
    assert one.ring_bandwidth(16, 8) == one.ring_bandwidth(4, 8) == 25 * GB  # one member a node
    assert one.ring_bandwidth(16, 16) == 25 * GB  # not in every node
    assert one.ring_bandwidth(32, 4) == 50 * GB  # two members beside two adapters
    assert one.ring_bandwidth(64, 1) == 100 * GB  # eight members, but four adapters a ring
    assert replace(one, adapters_per_ring=8).ring_bandwidth(64, 1) == 200 * GB
    assert replace(one, nvlink=80 * GB).ring_bandwidth(64, 1) == 80 * GB  # a ring also runs inside


def test_the_link_of_a_message():
    one = replace(A100, link_efficiency=0.5)
    assert one.message_bandwidth(4, 2) == 150 * GB
    assert one.message_bandwidth(8, 2) == 12.5 * GB  # the slowest hop leaves the node


def test_refusals():
    with pytest.raises(ValueError, match="'tpu' is unknown; use one of a100-80g"):
        gpu("tpu")
    with pytest.raises(
        ValueError, match=r"GPU a100-80g:\n  peak=0 must be above 0\n  link_efficiency=1.5 must be at most 1"
    ):
        replace(A100, peak=0, link_efficiency=1.5)
    assert gpu("A100-80G") is A100
