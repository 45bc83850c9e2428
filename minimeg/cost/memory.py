"""What fills a GPU's memory? One rank of one layout, term by term.

The first stage holds the most micro-batches, the last one the logits; whichever is fuller decides whether a layout fits. Formulas:
``minimeg.cost.activations`` (Korthikanti et al. 2022, arXiv 2205.05198) and ``minimeg.cost.optimizer`` (Megatron-Core).

See it run: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --explain "t8 p8 d16 n3 b1 selective"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minimeg.cost.activations import activation_bytes_per_layer, attention_core_bytes, in_flight
from minimeg.cost.layout import Job, Layout
from minimeg.cost.optimizer import megatron_bytes_per_parameter
from minimeg.cost.parameters import rank_parameters


@dataclass(frozen=True)
class Term:
    """One line of a sum: what it is, how it comes about, its value in bytes or seconds."""

    name: str
    formula: str
    value: float


def rank_memory(job: Job, layout: Layout, stage: int, held: int) -> list[Term]:
    """Bytes of a rank of one stage at its peak.

    Args:
        held: chunk activations in flight, from a simulated schedule or ``in_flight``.

    Beside layers, the extras of Korthikanti et al. 2022, section 4.3: the embedding's dropout mask for min(p, m) micro-batches on the
    first stage; inputs of the last norm and of the output layer and 32-bit logits of one micro-batch on the last. With
    recomputation, what one layer dropped lives while it is replayed. A stage's output is freed once sent (appendix B).
    """
    shape, t, b = job.shape, layout.tensor, layout.microbatch
    p, n, m = layout.pipeline, layout.chunks, layout.microbatches(job.batch)
    shards = t if job.sequence_parallel else 1  # of what only sequence parallelism splits
    count = rank_parameters(shape, t, p, stage)
    each = megatron_bytes_per_parameter("bf16_fp32", layout.data, job.distributed_optimizer)
    layer = activation_bytes_per_layer(shape, b, t, job.sequence_parallel, layout.recompute)
    deep, sb = shape.layers // (p * n), shape.sequence * b
    terms = [
        Term("weights, gradients, optimizer", f"{count:,} parameters x {each:.4g} bytes", count * each),
        Term("activations of layers", f"{held} in flight x {deep} layers x {layer:,} bytes", held * deep * layer),
    ]
    if stage == 0:
        embedding = min(p, m) * sb * shape.hidden // shards
        terms.append(Term("dropout mask of the embedding", f"{min(p, m)} micro-batches x sbh/{shards}", embedding))
    if stage == p - 1:
        output = 4 * sb * shape.hidden // shards + 4 * sb * (-(-shape.vocabulary // t))
        terms.append(Term("last norm, output layer, logits", f"4 sbh/{shards} + 4 sbv/{t}", output))
    if layout.recompute == "full":
        whole = activation_bytes_per_layer(shape, b, t, job.sequence_parallel) - layer
        terms.append(Term("the layer being replayed", "all that full recomputation dropped", whole))
    if layout.recompute == "selective":
        terms.append(Term("the attention being replayed", f"5 a s^2 b / {t}", attention_core_bytes(shape, b, t)))
    return [*terms, Term("reserve", "CUDA context, buffers, fragmentation: assumed", job.reserve)]


def fullest_rank(job: Job, layout: Layout, peaks: Sequence[int] | None = None) -> tuple[int, list[Term]]:
    """The stage whose ranks hold most, and its terms.

    Args:
        peaks: chunk activations in flight by stage, from a simulation; the closed form ``in_flight`` if None.
    """
    p, m = layout.pipeline, layout.microbatches(job.batch)
    stages = sorted({0, p - 1})  # those between hold less than the first
    held = {s: peaks[s] if peaks else in_flight(p, s, m, layout.chunks) for s in stages}
    ranks = [(stage, rank_memory(job, layout, stage, held[stage])) for stage in stages]
    return max(ranks, key=lambda rank: (total(rank[1]), -rank[0]))


def total(terms: Sequence[Term]) -> float:
    """The sum of the values."""
    return sum(term.value for term in terms)
