"""What a training run costs, on paper: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --gpu a100-80g``.

    --model NAME                 parameters, FLOPs, bytes: the formulas of the papers
    with --gpus N                legal layouts (t, p, d, n, micro-batch, recomputation) that fit, fastest first, and why the first wins
    with --explain LAYOUT        one layout, term by term: --explain "t8 p8 d16 n3 b1 selective"
    with --svg FILE              a heat map of layouts
    --list                       models and GPUs by name

Times are estimates: schedules are simulated, matrix products and links run at a part of the data sheet's speed, and no communication
of tensor and data parallelism is hidden. Every number can be replaced. Message start-up is free here, so n tends to come out large.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minimeg.cost.estimate import estimate
from minimeg.cost.hardware import GB, GPU, gpu
from minimeg.cost.heatmap import heat_map
from minimeg.cost.layout import Job, Layout
from minimeg.cost.planner import plan
from minimeg.cost.report import explanation, formulas, listing, plan_report
from minimeg.cost.shapes import GPTShape, model

# flag -> (field of GPU, factor to its unit, what it is)
_GPU_FLAGS = {
    "--peak-tflops": ("peak", 1e12, "dense bf16 peak of the data sheet"),
    "--matmul-tflops": ("matmul", 1e12, "that the best large matrix product reaches"),
    "--memory-gb": ("memory", GB, "memory of a GPU"),
    "--memory-bandwidth-gbs": ("memory_bandwidth", GB, "memory bandwidth"),
    "--nvlink-gbs": ("nvlink", GB, "NVLink, one direction"),
    "--adapter-gbs": ("adapter", GB, "network adapter of a GPU, one direction"),
    "--matmul-efficiency": ("matmul_efficiency", 1.0, "part of --matmul-tflops that a transformer reaches"),
    "--memory-efficiency": ("memory_efficiency", 1.0, "part of the memory bandwidth that is reached"),
    "--link-efficiency": ("link_efficiency", 1.0, "part of a link that is reached"),
}
_GPU_COUNTS = {
    "--adapters-per-ring": ("adapters_per_ring", "adapters that one group's ring can use in a node"),
    "--gpus-per-node": ("gpus_per_node", "GPUs joined by NVLink"),
}
_SHAPE_FLAGS = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--seq-length": "sequence",
    "--vocab-size": "vocabulary",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if no layout fits, or the explained one does not; 2 for arguments that do not fit."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        words, fits, drawing = _answer(options)
        if options.svg:
            options.svg.write_text(drawing, encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(words)
    return 0 if fits else 1


def _answer(options: argparse.Namespace) -> tuple[str, bool, str]:
    """What to print, whether anything fits, and the picture, "" where none is asked for."""
    if options.list:
        return listing(), True, ""
    shape, batch = _shape(options)
    if options.gpus is None:
        if options.explain or options.svg:
            raise ValueError("--explain and --svg need --gpus, such as --gpus 1024")
        return formulas(shape, batch), True, ""
    job = Job(
        shape,
        options.gpus,
        _gpu(options),
        batch,
        options.tokens,
        options.sequence_parallel,
        options.distributed_optimizer,
        options.reserve_gb * GB,
    )
    drawing = ""
    if options.explain:
        one = estimate(job, Layout.parse(options.explain))
        if options.svg:
            drawing = one.timeline.svg()
        return explanation(one), one.fits, drawing
    found = plan(job, options.top)
    if options.svg:
        drawing = heat_map(found)
    return plan_report(found), bool(found.best), drawing


def _shape(options: argparse.Namespace) -> tuple[GPTShape, int]:
    known = model(options.model)
    given = {field: getattr(options, field) for field in _SHAPE_FLAGS.values() if getattr(options, field) is not None}
    batch = known.global_batch if options.global_batch_size is None else options.global_batch_size
    return replace(known.shape, **given), batch


def _gpu(options: argparse.Namespace) -> GPU:
    given = {
        field: getattr(options, field) * factor
        for field, factor, _ in _GPU_FLAGS.values()
        if getattr(options, field) is not None
    }
    counts = {
        field: getattr(options, field) for field, _ in _GPU_COUNTS.values() if getattr(options, field) is not None
    }
    return replace(gpu(options.gpu), **given, **counts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minimeg.cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="models and GPUs by name, with sources")
    add("--model", default="gpt3-175b", help="see --list (%(default)s)")
    add("--gpus", type=int, help="how many")
    add("--gpu", default="a100-80g", help="see --list (%(default)s)")
    add("--global-batch-size", type=int, help="sequences; that of the paper if left out")
    add("--tokens", type=float, default=300e9, help="of the whole training (%(default).0f)")
    add("--top", type=_positive, default=10, help="layouts to list (%(default)s)")
    add("--explain", metavar="LAYOUT", help='such as "t8 p8 d16 n3 b1 selective"')
    add("--svg", type=Path, metavar="FILE", help="heat map of layouts; with --explain the simulated timeline")
    switch = argparse.BooleanOptionalAction
    add("--sequence-parallel", action=switch, default=True, help="wherever t > 1")
    add("--distributed-optimizer", action=switch, default=True, help="ZeRO stage 1")
    add("--reserve-gb", type=float, default=4.0, help="memory of a GPU that is not ours (%(default)s)")
    for flag, field in _SHAPE_FLAGS.items():
        add(flag, dest=field, type=int, help="instead of the model's")
    for flag, (field, _, words) in _GPU_FLAGS.items():
        add(flag, dest=field, type=float, help=words)
    for flag, (field, words) in _GPU_COUNTS.items():
        add(flag, dest=field, type=int, help=words)
    return parser


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} must be a whole number, at least 1")
    return int(word)


if __name__ == "__main__":
    sys.exit(main())
