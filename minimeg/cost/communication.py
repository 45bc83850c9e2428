"""Who sends how much? Elements per layer, message and step for tensor, pipeline and data parallelism.

Everything is counted in ELEMENTS that one rank sends, by the ring formula (``minimeg.cost.collectives``); times 2 in 16 bits.

    tensor      per layer and micro-batch   8 bsh (t-1)/t     2 all-reduces forward (g), 2 backward (f)
    pipeline    per message                 bsh               down and up once per micro-batch and boundary; interleaved n times
    data        per step                    2 (d-1)/d P       P: parameters of the rank

Sources: Shoeybi et al. 2019, arXiv 1909.08053; Narayanan et al. 2021, arXiv 2104.04473, sections 3.2 and 4.1; Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2.

See it run: ``python -m minimeg.cost --model gpt3-175b``; held against the ledger in ``notebooks/05_sequence_parallelism.ipynb``.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from minimeg.cost.collectives import wire_factor
from minimeg.cost.flops import Recompute
from minimeg.cost.shapes import GPTShape


def layer_collectives(
    sequence_parallel: bool = False, recompute: Recompute = "none", regather: bool = False
) -> dict[str, dict[str, int]]:
    """Collectives of the full [s, b, h] that one layer does for a micro-batch, by pass.

    Without sequence parallelism: 2 all-reduces forward (g, behind attention and MLP), 2 backward (f). Shoeybi et al. 2019, section 3.
    With: g and its conjugate are an all-gather and a reduce-scatter, 2 of each per pass. Korthikanti et al. 2022, section 4.2.2.
    ``recompute="full"`` repeats those of the forward pass; "selective" none, as the core needs no other rank.

    ``regather``: for memory of 34/t each rank stores only its shard of the gathered input, so the backward pass gathers it again
    before each of two weight gradients. The paper says so, but its "no communication overhead" leaves these 2 all-gathers out,
    as they overlap with computation: 10 bsh (t-1)/t in all, not 8.
    """
    one_pass = Counter({"all_gather": 2, "reduce_scatter": 2} if sequence_parallel else {"all_reduce": 2})
    backward = one_pass + one_pass if recompute == "full" else one_pass.copy()
    if sequence_parallel and regather:
        backward["all_gather"] += 2
    return {"forward": dict(one_pass), "backward": dict(backward)}


def tensor_parallel_elements(
    shape: GPTShape,
    microbatch: int,
    tensor: int,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    regather: bool = False,
) -> Fraction:
    """8 bsh (t-1)/t per layer, forward and backward. Narayanan et al. 2021, section 3.2.

    The same with sequence parallelism. 12 bsh (t-1)/t with full recomputation, whose 2 extra all-reduces the paper leaves out; ZeRO
    (arXiv 1910.02054, section 8) counts them: "12 x seq x hidden x batch". 10 with ``regather``, see ``layer_collectives``.
    """
    passes = layer_collectives(sequence_parallel, recompute, regather).values()
    total = sum(
        (count * wire_factor(operation, tensor) for one in passes for operation, count in one.items()), Fraction(0)
    )
    return total * shape.sequence * microbatch * shape.hidden


def model_collectives() -> dict[str, int]:
    """All-reduces of [s, b, h] beside the layers, per micro-batch: 1 after the embedding, 1 backward before the output layer.

    Shoeybi et al. 2019, section 3, names the first; the second is the f of the output layer.
    """
    return {"embedding": 1, "output": 1}


def cross_entropy_elements(shape: GPTShape, microbatch: int) -> int:
    """3 b s: numbers reduced by the vocab-parallel cross entropy. Shoeybi et al. 2019, section 3, says "b x s".

    That is the order of magnitude: an implementation reduces the maximum, the target's logit and the sum of exponentials. Gathering
    logits instead would move b s v.
    """
    return 3 * microbatch * shape.sequence


def pipeline_message_elements(shape: GPTShape, microbatch: int, tensor: int = 1) -> int:
    """b s h: one message between neighbouring stages. Narayanan et al. 2021, section 3.2; b s h / t with scatter/gather, section 4.1.

    Per boundary and direction: a micro-batch sends one down and one up. With n chunks a rank there are n times as many boundaries, and
    the wrap-around from the last rank to the first.

    Args:
        tensor: t where each rank sends its own part and the receivers gather (scatter/gather, or sequence parallelism), else 1.
    """
    return microbatch * shape.sequence * shape.hidden // tensor


def pipeline_elements(shape: GPTShape, microbatch: int, microbatches: int, tensor: int = 1, chunks: int = 1) -> int:
    """2 m n bsh (/t): what a middle rank sends in a step, m n messages down and m n up. Narayanan et al. 2021, sections 2.2 and 3.2."""
    return 2 * microbatches * chunks * pipeline_message_elements(shape, microbatch, tensor)


def data_parallel_elements(parameters: float, data: int) -> float:
    """2 (d-1)/d P: ring all-reduce of the gradients, once a step. Narayanan et al. 2021, section 3.3.

    ZeRO's 2 Psi (``zero_communication``) drops the factor (d-1)/d.
    """
    return float(wire_factor("all_reduce", data)) * parameters
