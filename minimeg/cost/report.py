"""The planner in words: the formulas of a model, the list of layouts with the reasons, and one layout as a sum.

See it run: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --gpu a100-80g``.
"""

from __future__ import annotations

from collections.abc import Sequence

from minimeg.cost.activations import activation_bytes_per_layer, attention_core_ratio
from minimeg.cost.communication import pipeline_message_elements, tensor_parallel_elements
from minimeg.cost.estimate import Estimate
from minimeg.cost.flops import RECOMPUTE, hardware_flops_per_iteration
from minimeg.cost.hardware import GB, GPUS
from minimeg.cost.layout import Job
from minimeg.cost.memory import Term, total
from minimeg.cost.optimizer import megatron_bytes_per_parameter
from minimeg.cost.parameters import parameters
from minimeg.cost.planner import Plan, alternatives
from minimeg.cost.shapes import MODELS, GPTShape


def formulas(shape: GPTShape, batch: int, tensor: int = 8) -> str:
    """What follows from the shape alone, each line with its source."""
    count = parameters(shape)
    lines = [
        f"{described(shape)}, global batch B={batch}",
        "",
        f"parameters          {count:,}   Narayanan et al. 2021, eq 2",
        f"weights, gradients, Adam   {count * megatron_bytes_per_parameter() / GB:,.1f} GB   18 bytes each: bf16, fp32 gradients",
        "",
        "FLOPs per iteration, activations of a layer and micro-batch of 1",
        "(Korthikanti et al. 2022, eqs 1 to 8, as counted; with tensor and sequence parallelism)",
        "",
    ]
    rows: list[tuple[str, ...]] = [("recompute", "EFLOPs", "MB at t=1", f"MB at t={tensor}")]
    shares = [t for t in (1, tensor) if shape.hidden % t == 0 and shape.heads % t == 0]
    for recompute in RECOMPUTE:
        sizes = [activation_bytes_per_layer(shape, 1, t, True, recompute) / 1e6 for t in shares]
        flops = hardware_flops_per_iteration(shape, batch, recompute) / 1e18
        rows.append((recompute, f"{flops:.4g}", *(f"{size:,.1f}" for size in sizes), *[""] * (2 - len(shares))))
    lines += [table(rows), "", f"5as/h = {attention_core_ratio(shape):.4g}"]
    if len(shares) == 2:
        moved = 2 * float(tensor_parallel_elements(shape, 1, tensor)) / 1e6
        lines.append(f"tensor, t={tensor}: {moved:,.1f} MB a rank, layer and micro-batch   8 bsh (t-1)/t in 16 bits")
    message = 2 * pipeline_message_elements(shape, 1) / 1e6
    lines.append(f"pipeline: {message:,.1f} MB a message   bsh in 16 bits, 1/t of it by each tensor-parallel rank")
    return "\n".join(lines)


def plan_report(plan: Plan) -> str:
    """The best layouts, and why the first of them wins."""
    job = plan.job
    lines = [
        heading(job),
        f"{len(plan.sizes):,} legal layouts, {len(plan.candidates):,} fit {job.gpu.memory / GB:.0f} GB, "
        f"{plan.simulated} simulated: the others' lower bounds are above the times below",
        "",
    ]
    if not plan.best:
        return "\n".join([*lines, _nothing(plan)])
    header = ("layout", "m", "GB", "bubble", "tp s", "pp s", "dp s", "step s", "MFU", "days")
    rows = [header]
    for one in plan.best:
        rows.append(
            (
                str(one.layout),
                str(one.layout.microbatches(job.batch)),
                f"{one.memory_bytes / GB:.1f}",
                f"{one.bubble:.1%}",
                f"{one.tensor_seconds:.2f}",
                f"{one.pipeline_seconds:.2f}",
                f"{one.data_seconds:.2f}",
                f"{one.seconds:.2f}",
                f"{one.mfu:.1%}",
                f"{one.days:.1f}",
            )
        )
    first = plan.best[0]
    lines += [
        table(rows),
        "",
        links(first),
        "",
        f"Why {first.layout}: the best with one other choice",
        *_aligned([(a.choice, a.words) for a in alternatives(plan)]),
    ]
    return "\n".join(lines)


def _nothing(plan: Plan) -> str:
    if not plan.sizes:
        job = plan.job
        return (
            f"No layout is legal. t has to divide heads={job.shape.heads}, p n the layers={job.shape.layers}, "
            f"t p d has to be gpus={job.gpus}, d b to divide the batch={job.batch}; try --gpus 8 or another --global-batch-size"
        )
    least, layout = min(plan.sizes)
    return f"No layout fits: the smallest needs {least / GB:.1f} GB, with {layout}; use more GPUs or more memory"


def explanation(one: Estimate) -> str:
    """One layout as sums: memory of the fullest rank, seconds of an iteration, and what follows from these."""
    job, layout = one.job, one.layout
    stage, terms = one.memory
    verdict = "fits" if one.fits else "DOES NOT FIT"
    work = one.stages[one.busiest]
    lines = [
        heading(job),
        f"layout {layout}: m = {layout.microbatches(job.batch)} micro-batches, "
        f"{job.shape.layers // (layout.pipeline * layout.chunks)} layers a chunk",
        "",
        f"GB on a rank of stage {stage}, the fullest: {verdict} {job.gpu.memory / GB:.0f}",
        *_sum(terms, GB, "GB"),
        "",
        "seconds of an iteration",
        *_sum(one.time_terms, 1.0, "s"),
        "",
        f"one micro-batch on stage {one.busiest}, the busiest: F {work.forward_seconds * 1e3:.2f} ms, "
        f"B {work.backward_seconds * 1e3:.2f} ms",
        f"the schedule, {one.timeline.schedule.name} with {layout.pipeline} stages, was simulated with these times",
        links(one),
        "",
        f"MFU   {one.mfu:.2%}   model FLOPs (Korthikanti et al. 2022, eq 7) / (step x {job.gpus} x {job.gpu.peak / 1e12:.0f} TFLOP/s)",
        f"HFU   {one.hfu:.2%}   the same with what is recomputed",
        f"days  {one.days:.1f}   {job.tokens / 1e9:.4g} billion tokens / (B s = {job.batch * job.shape.sequence:,}) x step",
    ]
    return "\n".join(lines)


def heading(job: Job) -> str:
    """The job in two lines."""
    gpu = job.gpu
    return (
        f"{described(job.shape)}, B={job.batch}, {job.tokens / 1e9:.4g} billion tokens, {job.gpus} x {gpu.name}\n"
        f"products {gpu.matmul * gpu.matmul_efficiency / 1e12:.0f} of {gpu.peak / 1e12:.0f} TFLOP/s, "
        f"memory {gpu.memory_bandwidth * gpu.memory_efficiency / 1e12:.2f} TB/s, "
        f"NVLink {gpu.nvlink * gpu.link_efficiency / GB:.0f} GB/s, adapter {gpu.adapter * gpu.link_efficiency / GB:.0f} GB/s; "
        f"sequence parallelism {'on' if job.sequence_parallel else 'off'}, "
        f"optimizer {'distributed' if job.distributed_optimizer else 'replicated'}"
    )


def links(one: Estimate) -> str:
    """Which link each axis uses."""
    gpu, layout = one.job.gpu, one.layout
    t, p, d = layout.tensor, layout.pipeline, layout.data
    found = []
    for name, ranks, stride, speed in (
        ("tp", t, 1, gpu.ring_bandwidth(t, 1)),
        ("pp", p, t * d, gpu.message_bandwidth(p, t * d)),
        ("dp", d, t, gpu.ring_bandwidth(d, t)),
    ):
        if ranks > 1:
            where = "NVLink" if ranks * stride <= gpu.gpus_per_node else "between nodes"
            found.append(f"{name} {where}, {speed / GB:.0f} GB/s")
    return "links: " + "; ".join(found) if found else "links: none, one GPU"


def listing() -> str:
    """All models and GPUs by name."""
    models: list[tuple[str, ...]] = [("model", "parameters", "L", "h", "a", "s", "B", "source")]
    models += [
        (
            name,
            f"{parameters(m.shape) / 1e9:.1f}e9",
            *map(str, (m.shape.layers, m.shape.hidden, m.shape.heads, m.shape.sequence, m.global_batch)),
            m.source,
        )
        for name, m in MODELS.items()
    ]
    gpus: list[tuple[str, ...]] = [("gpu", "peak", "products", "memory", "TB/s", "NVLink", "adapter", "source")]
    gpus += [
        (
            g.name,
            *(f"{x / 1e12:.4g}" for x in (g.peak, g.matmul)),
            f"{g.memory / GB:.0f}",
            f"{g.memory_bandwidth / 1e12:.4g}",
            *(f"{x / GB:.0f}" for x in (g.nvlink, g.adapter)),
            g.note,
        )
        for g in GPUS.values()
    ]
    units = "TFLOP/s dense bf16; GB; GB/s in one direction"
    return "\n".join([table(models, right=range(1, 7)), "", table(gpus, right=range(1, 7)), units])


def described(shape: GPTShape) -> str:
    """The shape in one line."""
    return (
        f"GPT of {parameters(shape) / 1e9:.4g} billion parameters: L={shape.layers} h={shape.hidden} a={shape.heads} "
        f"s={shape.sequence} v={shape.vocabulary}"
    )


def table(rows: Sequence[Sequence[str]], right: Sequence[int] | None = None) -> str:
    """Columns side by side; the first is flush left, the others flush right, or those in ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = range(1, len(widths)) if right is None else right
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in flush else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _sum(terms: Sequence[Term], unit: float, name: str) -> list[str]:
    rows = [(term.name, f"{term.value / unit:9.3f}", term.formula) for term in terms]
    rows.append(("sum", f"{total(terms) / unit:9.3f}", name))
    return ["  " + line for line in table(rows, right=(1,)).splitlines()]


def _aligned(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return ["  " + line for line in table(pairs, right=()).splitlines()]
