"""How many bytes does a GPT hold between forward and backward?

Korthikanti et al. 2022 (arXiv 2205.05198), section 4. Per layer and micro-batch, in units of s b h bytes with 16-bit activations and
one-byte dropout masks:

    attention   11 + 5as/h    input of q, k, v 2; Q and K 4; V 2; input of the projection 2; mask 1;
                              s x s: softmax 2as/h, its dropout's mask as/h, dropout's output 2as/h
    MLP         19            inputs of both linears 2 + 8, of GELU 8; mask 1
    two norms    4            their inputs

No fused attention: the s x s matrices are stored. GELU stores its input. Norm statistics (two numbers a token) and the causal mask,
one shared buffer, are not counted.

See it run: ``python -m minimeg.cost --model 22b``; counted in real runs in ``notebooks/11_recomputation.ipynb``.
"""

from __future__ import annotations

from math import sqrt

from minimeg.cost.flops import RECOMPUTE, Recompute
from minimeg.cost.parameters import split_faults
from minimeg.cost.shapes import GPTShape
from minimeg.schedule.actions import refuse, size_faults


def attention_core_ratio(shape: GPTShape) -> float:
    """5as/h: bytes of the attention core over s b h. Korthikanti et al. 2022, equation 1; 80 for GPT-3, 64 for MT-NLG."""
    return 5 * shape.heads * shape.sequence / shape.hidden


def selective_saving(shape: GPTShape) -> float:
    """(5as/h) / (34 + 5as/h): what selective recomputation saves with t = 1 or with sequence parallelism.

    Korthikanti et al. 2022, section 5: 70 % for GPT-3, 65 % for MT-NLG.
    """
    return attention_core_ratio(shape) / (34 + attention_core_ratio(shape))


def activation_bytes_per_layer(
    shape: GPTShape,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> int:
    """Bytes of one layer on one rank for one micro-batch. Korthikanti et al. 2022, equations 1, 2, 4, 6 and Table 2.

        recompute    without sequence parallelism     with
        none         sbh (10 + 24/t + 5as/(ht))       sbh (34/t + 5as/(ht))
        selective    sbh (10 + 24/t)                  sbh 34/t
        full         sbh 2                            sbh 2/t

    ``selective`` drops the attention core alone (Q K^T, softmax, dropout, times V). ``full`` keeps the layer's input, which every
    tensor-parallel rank has whole: 2 sbh, NOT divided by t. With sequence parallelism the input is a shard; Table 2 has no such
    row, and prints 2 sbh.

    Args:
        microbatch: b, sequences. tensor: t, a divisor of hidden and heads.

    Raises:
        ValueError: sizes that do not fit, all in one message.
    """
    faults = size_faults(microbatch=microbatch) + split_faults(shape, tensor)
    if recompute not in RECOMPUTE:
        faults.append(f"recompute={recompute!r} is unknown; use one of {', '.join(RECOMPUTE)}")
    refuse(faults, "cannot count activations")
    sbh = shape.sequence * microbatch * shape.hidden
    if recompute == "full":
        return 2 * sbh // tensor if sequence_parallel else 2 * sbh
    core = attention_core_bytes(shape, microbatch, tensor) if recompute == "none" else 0
    replicated = 0 if sequence_parallel else 10 * sbh  # inputs of the norms and linears, dropout masks
    return replicated + (34 * sbh if sequence_parallel else 24 * sbh) // tensor + core


def attention_core_bytes(shape: GPTShape, microbatch: int, tensor: int = 1) -> int:
    """5 a s^2 b / t: the s x s matrices of one layer. Korthikanti et al. 2022, section 4.1."""
    return 5 * shape.heads * shape.sequence**2 * microbatch // tensor


def in_flight(pipeline: int, rank: int, microbatches: int, chunks: int = 1) -> int:
    """Most chunk activations that a rank holds at once, each of L/(pn) layers, under 1F1B or, with n > 1, interleaved 1F1B.

    n = 1: min(p - r, m), "max(0, p - S)" of Korthikanti et al. 2022, appendix B. n > 1: one more than the warm-up forwards of
    Narayanan et al. 2021, section 2.2: min(2(p - r - 1) + (n - 1)p + 1, m n), for m a multiple of p.
    """
    if chunks == 1:
        return min(pipeline - rank, microbatches)
    return min(2 * (pipeline - rank - 1) + (chunks - 1) * pipeline + 1, microbatches * chunks)


def interleaving_memory_factor(pipeline: int, chunks: int) -> float:
    """1 + (p - 1)/(p n): how much more the first stage holds under interleaved 1F1B. Korthikanti et al. 2022, section 4.2.3.

    The paper calls the number of interleaving stages m; here m counts micro-batches, and chunks a rank are n. It holds for n > 1
    and enough micro-batches; plain 1F1B has 1, not the 1 + (p - 1)/p that n = 1 would give.
    """
    return 1.0 if chunks == 1 else 1 + (pipeline - 1) / (pipeline * chunks)


def first_stage_activation_bytes(
    shape: GPTShape,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = True,
    recompute: Recompute = "none",
    pipeline: int = 1,
    chunks: int = 1,
) -> float:
    """Bytes that the first stage's layers hold at their peak. Korthikanti et al. 2022, equation 5 and section 4.2.3.

    (sbhL/t)(34 + 5as/h) with tensor and sequence parallelism and no recomputation, whatever p is: p micro-batches in flight, of L/p
    layers each. Interleaving multiplies by ``interleaving_memory_factor``. GPipe would hold m micro-batches instead of p.
    """
    layer = activation_bytes_per_layer(shape, microbatch, tensor, sequence_parallel, recompute)
    return shape.layers * layer * interleaving_memory_factor(pipeline, chunks)


def extra_activation_bytes(shape: GPTShape, microbatch: int, tensor: int = 1, pipeline: int = 1) -> int:
    """(sbhL/t)(p/L + delta_{p=1} (4/L)(1 + v/h)): what the first stage holds beside its layers. Korthikanti et al. 2022, section 4.3.

    With tensor and sequence parallelism. The embedding's dropout mask, sbh/t for each of p micro-batches; and, where the first stage is
    also the last, inputs of the last norm and of the output layer, 2 sbh/t each, and logits in 32 bits, 4 sbv/t.

    The paper says these extras are "less than 0.01 %" for its 22B model; by its own formula the ratio to equation 5 is 0.0057, which
    is 0.57 %: the number is right as a ratio, the % sign is not.
    """
    sb = shape.sequence * microbatch
    last = 4 * sb * (shape.hidden + shape.vocabulary) if pipeline == 1 else 0
    return (sb * shape.hidden * pipeline + last) // tensor


def output_tensor_bytes(shape: GPTShape, microbatch: int, micro_batches_in_flight: int) -> int:
    """2 sbh r: what is saved by freeing a stage's output once it is sent, r micro-batches in flight, p at the first stage.

    Korthikanti et al. 2022, appendix B. The paper's "2.73 GB" for 530B is GiB: 2,936,012,800 bytes.
    """
    return 2 * shape.sequence * microbatch * shape.hidden * micro_batches_in_flight


def checkpoint_footprint(layers: int, checkpoints: float, input_size: float, intermediate_size: float) -> float:
    """c A_in + (L/c) A_int: c checkpoints are kept, and L/c layers between two of them are held while they are replayed.

    Narayanan et al. 2021, section 3.5. ``input_size`` is A_in, a layer's input; ``intermediate_size`` A_int, its rest; in any one unit.
    """
    return checkpoints * input_size + layers / checkpoints * intermediate_size


def best_checkpoints(layers: int, input_size: float, intermediate_size: float) -> float:
    """c = sqrt(L A_int / A_in), where ``checkpoint_footprint`` is least. Narayanan et al. 2021, section 3.5.

    For a GPT layer that is no square root of L: A_int is 27 A_in where 5as/h = 20, so c > L and every layer gets its checkpoint.
    """
    return sqrt(layers * intermediate_size / input_size)


def checkpointed_every(shape: GPTShape, microbatch: int, every: int) -> int:
    """Peak bytes with a checkpoint before every k-th layer, t = 1: 2 sbh ceil(L/k) + k layers while they are replayed.

    The whole-number form of ``checkpoint_footprint``, with equation 1 of Korthikanti et al. 2022 for a layer that is replayed.
    """
    kept = -(-shape.layers // every) * activation_bytes_per_layer(shape, microbatch, recompute="full")
    return kept + min(every, shape.layers) * activation_bytes_per_layer(shape, microbatch)
