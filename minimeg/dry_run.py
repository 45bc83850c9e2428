"""One rank of a large world, on a laptop: its groups, parameters, activations and every message, counted in a real step.

    python -m minimeg.train --dry-run --world-size 3072 --rank 515 --tp 8 --pp 64 --num-layers 128 --hidden-size 25600 \\
        --num-attention-heads 160 --seq-length 2048 --vocab-size 51200 --micro-batch-size 1 --global-batch-size 3072 --dtype bfloat16

The code is that of training: the same Trainer, the same schedule, the same Groups. Two things are not real. Tensors lie on torch's
"meta" device, so they have shapes and no values, and nothing is allocated; and torch's "fake" backend answers every operation at once.
What is counted is then held against the formulas of the papers (minimeg/cost).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from minimeg.comm import Ledger, ledger
from minimeg.cost import (
    GPTShape,
    activation_bytes_per_layer,
    data_parallel_elements,
    pipeline_message_elements,
    rank_parameters,
    tensor_parallel_elements,
)
from minimeg.data import TextDataset
from minimeg.memory import activation_memory
from minimeg.models.gpt import GPT
from minimeg.options import Options
from minimeg.parallel_state import ParallelState, initialize_model_parallel
from minimeg.parameter import named_shards
from minimeg.schedule import prove
from minimeg.trainer import Trainer


@contextmanager
def imagine(options: Options, rank: int, world_size: int) -> Iterator[ParallelState]:
    """``rank`` of a world that does not exist. This process must not belong to a real one."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    sizes = (
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.context_parallel_size,
    )
    try:
        with initialize_model_parallel(*sizes, backend="fake", device="cpu") as state:
            yield replace(state, device=torch.device("meta"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class DryRun:
    """What was counted. Bytes; ``statistics``: the part of the activations that belongs to the norms' statistics."""

    state: ParallelState
    trainer: Trainer
    book: Ledger
    parameters: int
    activations: int
    statistics: int
    seconds: float


def dry_run(options: Options, state: ParallelState, dataset: TextDataset) -> DryRun:
    """Build this rank and run one training step of its schedule."""
    start = time.perf_counter()
    trainer = Trainer(options, state, dataset)
    _know_the_other_stages(trainer)
    with activation_memory() as memory, ledger() as book:
        trainer.step(0)
    parameters = sum(param.numel() for _, param, _ in named_shards(trainer.chunks))
    return DryRun(
        state, trainer, book, parameters, memory.peak, memory.statistics(), seconds=time.perf_counter() - start
    )


def _know_the_other_stages(trainer: Trainer) -> None:
    """The global norm is collected under the names of all parameters, which the other stages would have told."""
    with torch.device("meta"):
        whole = GPT(trainer.options.config, trainer.state.tp)
    names = sorted(shard.name for _, _, shard in named_shards(whole) if shard.tied_to is None)
    trainer.optimizer.norm.position = {name: i for i, name in enumerate(names)}


def report(run: DryRun) -> str:
    """Everything as text: where the rank stands, its groups, counted beside computed, and the ledger."""
    state, grid = run.state, run.state.grid
    at = " ".join(f"{axis}={index}/{grid.sizes[axis]}" for axis, index in grid.coordinates(state.rank).items())
    lines = [f"rank {state.rank} of {grid.world_size}: {at}", ""]
    for name in ("tp", "dp", "pp", "mp", "embedding"):
        group = getattr(state, name)
        if group is not None and group.size > 1:
            lines.append(f"{name:<10} {group.size:>5} ranks  {_shortly(group.ranks)}")
    layers = [int(i) for chunk in run.trainer.chunks for i in chunk.layers]
    lines += [f"{'layers':<10} {len(layers):>5}        {_shortly(layers)}", ""]
    lines.append(f"{'':<56} {'counted':>20} {'formula':>20}")
    for what, counted, formula in comparison(run):
        lines.append(f"{what:<56} {counted:>20,.0f} {'' if formula is None else f'{formula:,.0f}':>20}")
    lines += ["", run.book.table(), "", f"built and run in {run.seconds:.1f} s"]
    return "\n".join(lines)


def comparison(run: DryRun) -> list[tuple[str, float, float | None]]:
    """(what, counted, formula); None where no formula of the papers covers this layout."""
    options, sizes, schedule, book = run.trainer.options, run.state.grid.sizes, run.trainer.schedule, run.book
    config, t, p, stage = options.config, sizes["tp"], sizes["pp"], run.state.pp.rank
    shape = GPTShape(
        config.num_layers, config.hidden_size, config.num_attention_heads, options.seq_length, config.vocab_size
    )
    b, m, sp = options.micro_batch_size, schedule.microbatches, options.sequence_parallel
    size = next(run.trainer.chunks[0].parameters()).element_size()
    sbh = shape.sequence * b * shape.hidden * size
    first, last = (any(getattr(chunk, end) for chunk in run.trainer.chunks) for end in ("is_first", "is_last"))
    layers = sum(len(chunk.layers) for chunk in run.trainer.chunks)

    parameters = activations = None
    if config.num_layers % (p * schedule.chunks) == 0:
        if config.tied and schedule.placement == "loop":
            parameters = rank_parameters(shape, t, p, stage)
        counted = size == 2 and config.hidden_dropout and config.attention_dropout  # the papers count masks and 16 bits
        if counted and options.recompute_granularity is None:
            in_flight = prove(schedule).peak_in_flight[stage]
            activations = in_flight * layers // schedule.chunks * activation_bytes_per_layer(shape, b, t, sp)
    in_layers = layers * tensor_parallel_elements(shape, b, t, sp, regather=True) * size
    again = options.recompute_granularity is not None  # what is sent once more depends on what is recomputed
    at_the_ends = (2 * first + (3 if sp else 2) * last) * sbh * (t - 1) / t  # embedding and output layer
    tensor = [r.wire for r in book.records if r.group == "tp" and r.payload == sbh]
    message = size * pipeline_message_elements(shape, b, t if sp else 1)
    messages = m * sum((not chunk.is_first) + (not chunk.is_last) for chunk in run.trainer.chunks) if p > 1 else 0
    gradients = data_parallel_elements(run.parameters, sizes["dp"]) * max(
        size, 4
    )  # half precision is summed in float32
    if options.use_distributed_optimizer:
        gradients /= 2  # a reduce-scatter; the other half, the all-gather, brings the parameters back
    return [
        ("parameters", run.parameters, parameters),
        ("activations at the peak (formula: of the layers), bytes", run.activations - run.statistics, activations),
        ("  and statistics of the norms, bytes", run.statistics, None),
        (
            "tensor parallelism, all [s, b, h], bytes sent",
            sum(tensor),
            None if again else float(m * (in_layers + at_the_ends)),
        ),
        ("messages sent along the pipeline", book.total("count", "pp", "send"), messages),
        ("  bytes sent", book.total("wire", "pp", "send"), messages * message),
        ("gradients over data parallelism, bytes sent", book.total("wire", "dp-cp", phase="gradients"), gradients),
    ]


def _shortly(ranks: Sequence[int]) -> str:
    """All of a few; of many the first and the last."""
    return str(list(ranks)) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:3]))}, ... {ranks[-1]}]"
