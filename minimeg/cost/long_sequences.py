"""What does it cost to split one sequence over several ranks? Four ways, per layer, in elements that a rank sends.

    ring attention          overlapped if a block has F/B tokens or more        Liu et al. 2023, arXiv 2310.01889
    ring self-attention     8 (N-1) B Z (L/N) A                                 Li et al. 2021, arXiv 2105.13120
    Ulysses                 4 N h / P, falls with P                             DeepSpeed-Ulysses (DeepSpeed's blog, 2023)
    context parallelism     6 b s h_kv (c-1)/c                                  Megatron-Core, context_parallel.md

The letters are those of the papers. See them: ``notebooks/05_sequence_parallelism.ipynb``.
"""

from __future__ import annotations

from minimeg.schedule.actions import refuse, size_faults


def ring_attention_block(flops: float, bandwidth: float) -> float:
    """c >= F/B: tokens of a block from which on its transfer hides behind computation. Ring Attention, section 3.

    4 d c^2 / F >= 4 c d / B, d the head dimension: a block's attention against passing its keys and values in bf16.

    Args:
        flops: F, FLOP/s of a device. bandwidth: B, bytes/s in one direction.

    The paper's Table 2 prints 24.5 thousand tokens for the A100 on InfiniBand, where its own F/B is 24.96. Its 12.5 GB/s is a 100
    Gb/s link; Megatron's cluster has 25 GB/s per GPU. A causal mask halves the work, not the transfer, and unbalances the ring
    unless blocks are laid out in a zig-zag.
    """
    return flops / bandwidth


def ring_attention_sequence(flops: float, bandwidth: float) -> float:
    """s = 6c: least tokens per device, as each holds 6 blocks. Ring Attention, section 3 and Table 2."""
    return 6 * ring_attention_block(flops, bandwidth)


def ring_attention_bytes(batch: int, hidden: int, block: int) -> int:
    """6 b c h bytes of activations per layer and device, free of s. Ring Attention, Table 1."""
    return 6 * batch * block * hidden


def ring_self_attention_elements(devices: int, batch: int, heads: int, sequence: int, head_dim: int) -> int:
    """8 (N-1) B Z (L/N) A: 2 parts forward, 6 backward. Li et al. 2021, section 3.2.

    Equals Megatron's 8 b s h (t-1)/t with Z A = h, N = t.
    """
    refuse(_parts("devices", devices, "sequence", sequence), "cannot split the sequence")
    return 8 * (devices - 1) * batch * heads * (sequence // devices) * head_dim


def ulysses_elements(sequence: int, hidden: int, ranks: int, kv_hidden: int | None = None) -> float:
    """4 N h / P: all-to-alls of q, k, v (3 N h) and of the output (N h), forward. DeepSpeed-Ulysses, communication analysis.

    The blog counts N h / P per all-to-all of N h; exactly, a rank keeps 1/P of it, see ``ulysses_elements_exact``. With grouped-query
    attention q, k, v are h + 2 h_kv wide, not 3h. P may not exceed the number of (key-value) heads.
    """
    width = 2 * hidden + 2 * (hidden if kv_hidden is None else kv_hidden)
    return sequence * width / ranks


def ulysses_elements_exact(sequence: int, hidden: int, ranks: int, kv_hidden: int | None = None) -> float:
    """4 N h (P-1) / P^2: ``ulysses_elements`` without what a rank sends to itself. Derived."""
    return ulysses_elements(sequence, hidden, ranks, kv_hidden) * (ranks - 1) / ranks


def megatron_sequence_parallel_elements(sequence: int, hidden: int) -> int:
    """4 N h: 2 all-gathers and 2 reduce-scatters of N h, forward, whatever P is. DeepSpeed-Ulysses; exactly times (P-1)/P."""
    return 4 * sequence * hidden


def context_parallel_elements(batch: int, sequence: int, kv_hidden: int, context: int) -> tuple[int, int]:
    """(forward, backward) elements: 2 b s h_kv (c-1)/c keys and values; backward again, and their gradients: 4 b s h_kv (c-1)/c.

    Megatron-Core, context_parallel.md, names the collectives; the volumes are derived.

    Args:
        sequence: s, the whole sequence. kv_hidden: h_kv, key-value heads times head dimension, of this tensor-parallel rank.
            context: c, which must divide s.
    """
    refuse(_parts("context", context, "sequence", sequence), "cannot split the sequence")
    passed = batch * (sequence // context) * kv_hidden * (context - 1)
    return 2 * passed, 4 * passed


def _parts(name: str, parts: int, whole_name: str, whole: int) -> list[str]:
    faults = size_faults(**{name: parts, whole_name: whole})
    if not faults and whole % parts:
        faults.append(f"{name}={parts} does not divide {whole_name}={whole}; use a divisor, such as 1")
    return faults
