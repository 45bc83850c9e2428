"""Splitting a sequence: Ring Attention's Table 2, Li et al., Ulysses, and Megatron's context parallelism."""

import pytest

from minimeg.cost import (
    GPTShape,
    context_parallel_elements,
    megatron_sequence_parallel_elements,
    ring_attention_block,
    ring_attention_bytes,
    ring_attention_sequence,
    ring_self_attention_elements,
    tensor_parallel_elements,
    ulysses_elements,
    ulysses_elements_exact,
)
from minimeg.grid import Grid

from .oracles import PAPERS, cases, inputs


@pytest.mark.parametrize("test", cases("R4"), ids=inputs)
def test_r4_ring_attention(test):
    flops, bandwidth = test["inputs"]["TF"] * 1e12, test["inputs"]["GBps"] * 1e9
    block, sequence = ring_attention_block(flops, bandwidth) / 1e3, ring_attention_sequence(flops, bandwidth) / 1e3
    assert (block, sequence) == pytest.approx((test["expected_c_k"], test["expected_s_k"]), abs=5e-4)
    assert (round(block, 1), round(sequence, 1)) == tuple(test["paper"])


def test_r4_the_infiniband_row_is_rounded_oddly():
    (row,) = [row for row in PAPERS["R4"]["data"]["table2"] if "InfiniBand" in row[0]]
    _, flops, _, bandwidth, block, sequence = row
    found = ring_attention_block(flops * 1e12, bandwidth * 1e9) / 1e3
    assert found == 24.96 != block
    assert (found, 6 * found) == pytest.approx((block, sequence), rel=0.02)


def test_r4_activations_do_not_grow_with_the_sequence():
    assert ring_attention_bytes(batch=2, hidden=64, block=128) == 6 * 2 * 128 * 64


def test_r5_ring_self_attention_is_megatrons_volume():
    (test,) = cases("R5")
    i = test["inputs"]
    found = ring_self_attention_elements(i["N"], i["B"], i["Z"], i["L"], i["A"])
    assert found == test["expected"]
    assert found == tensor_parallel_elements(GPTShape(1, i["Z"] * i["A"], i["Z"], i["L"]), i["B"], i["N"])


def test_r6_ulysses():
    (test,) = cases("R6")
    i = test["inputs"]
    numbers = (i["N"], i["h"], i["P"])
    assert ulysses_elements(*numbers) == test["expected_approx"]
    assert ulysses_elements_exact(*numbers) == test["expected_exact_per_rank"]
    assert megatron_sequence_parallel_elements(i["N"], i["h"]) == test["megatron_approx"]
    assert megatron_sequence_parallel_elements(i["N"], i["h"]) / ulysses_elements(*numbers) == i["P"]


def test_r6_grouped_query_attention_sends_less():
    assert ulysses_elements(1024, 4096, 8, kv_hidden=1024) == 1024 * (4096 + 2 * 1024 + 4096) / 8


def test_r7_context_parallelism():
    volumes, groups = cases("R7")
    i = volumes["inputs"]
    found = context_parallel_elements(i["b"], i["s"], i["h_kv"], i["c"])
    assert found == (volumes["expected"]["fwd"], volumes["expected"]["bwd"])
    assert Grid(4, tp=2, cp=2).groups("cp") == groups["expected"]
    assert context_parallel_elements(1, 8192, 1024, 1) == (0, 0)


def test_refusals():
    with pytest.raises(ValueError, match="context=3 does not divide sequence=8192; use a divisor"):
        context_parallel_elements(1, 8192, 1024, 3)
    with pytest.raises(ValueError, match="devices=0"):
        ring_self_attention_elements(0, 1, 1, 8, 1)
