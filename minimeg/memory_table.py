"""Measured | formula: what a layer, a stage and a whole pipeline hold, beside what the papers say they hold.

    layer       34 + 5as/h in units of sbh bytes, and what tensor and sequence parallelism and recomputation make of it
    pipeline    the first stage holds p micro-batches of L/p layers under 1F1B: as much as one device without a pipeline;
                interleaving multiplies by 1 + (p - 1)/(p n)
    outputs     a stage that does not free what it has sent holds 2 sbh more for each micro-batch in flight

In 16 bits, with dropout, and with nothing fused, as the papers count. Statistics of the norms stand apart (two numbers a token).

Source: Korthikanti et al. 2022, equations 1 to 5, sections 4.2.3 and 5, appendix B.
See it run: ``notebooks/11_recomputation.ipynb``, or
``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.activation_memory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from minimeg.autograd import apply
from minimeg.comm import Group
from minimeg.cost import GPTShape, activation_bytes_per_layer
from minimeg.cost.activations import attention_core_bytes
from minimeg.data import MicroBatch
from minimeg.memory import ActivationMemory, SavedTensor, activation_memory
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.models.recomputation import Plan, Recomputation
from minimeg.pipeline import run
from minimeg.recompute import Recompute
from minimeg.schedule import Schedule, prove

WHOLE = Recomputation()


@dataclass(frozen=True)
class Row:
    """``measured`` and ``formula`` in bytes; neither counts ``statistics``, those of the norms."""

    what: str
    measured: float
    formula: float
    statistics: float = 0


def table(rows: Sequence[Row], unit: int) -> str:
    """One line a row, in units of ``unit`` bytes, e.g. s * b * h."""
    width = max([4, *(len(row.what) for row in rows)])
    lines = [f"{'':<{width}} {'measured':>12} {'formula':>12} {'apart by':>9} {'statistics':>11}"]
    for row in rows:
        off = row.measured / row.formula - 1 if row.formula else 0.0
        numbers = (
            f"{row.measured / unit:>12,.3f} {row.formula / unit:>12,.3f} {off:>9.3%} {row.statistics / unit:>11,.3f}"
        )
        lines.append(f"{row.what:<{width}} {numbers}")
    return "\n".join(lines)


# ---- layers --------------------------------------------------------------------------------------------------------------------


def layers_formula(
    config: GPTConfig, length: int, batch: int, tp: int, how: Recomputation = WHOLE, layers: int = 1
) -> float:
    """Bytes that layers of one chunk hold on one rank for one micro-batch of ``batch`` x ``length`` tokens, in 16 bits.

    Korthikanti et al. 2022, Table 2; and two further modules for selective recomputation: the MLP, 16 sbh/t, and what the norms put
    out, 4 sbh. Full recomputation holds the input of each group of layers.
    """
    shape = GPTShape(config.num_layers, config.hidden_size, config.num_attention_heads, length, config.vocab_size)
    sp, sbh = config.sequence_parallel, length * batch * config.hidden_size
    # Distributed over tp, a whole input is cut as sequence parallelism would have it.
    group_input = activation_bytes_per_layer(shape, batch, tp, sp or how.distribute, "full")
    forgotten = {
        "core_attn": attention_core_bytes(shape, batch, tp),
        "mlp": 16 * sbh / tp,
        "layernorm": 4 * sbh / tp if sp else 4 * sbh,
    }
    layer = activation_bytes_per_layer(shape, batch, tp, sp)
    layer_held = layer - sum(forgotten[name] for name in how.modules if how.granularity == "selective")
    groups = Plan(how, Recompute()).groups(layers)
    return sum(group_input if again else len(group) * layer_held for group, again in groups)


def measure_layers(
    config: GPTConfig,
    group: Group,
    length: int,
    batch: int,
    how: Recomputation = WHOLE,
    layers: int = 1,
    device: str = "cpu",
) -> Row:
    """What layers in bfloat16 hold between their forward and their backward. Collective over ``group``.

    ``device="meta"`` measures a model that no machine here could hold: the storages have sizes and nothing in them.
    """
    # The middle one of three stages: layers, and nothing else.
    with torch.device(device):
        stage = GPT(replace(config, num_layers=3 * layers), group, 1, 3, recomputation=how).bfloat16()
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        microbatch = MicroBatch(tokens, tokens, tokens == 0, 0, 0)
        shape, dtype = stage.input_shape(microbatch)
        x = torch.ones(shape, dtype=dtype, requires_grad=True)
    with activation_memory(stage) as memory:
        out = stage(x, microbatch)
        held, statistics = memory.live, memory.statistics("now")
        out.sum().backward()
    formula = layers_formula(config, length, batch, group.size, how, layers)
    return Row(describe(how), held - statistics, formula, statistics)


def describe(how: Recomputation) -> str:
    """In a word or two: "none", "full, uniform 2", "selective mlp"."""
    if how.granularity is None:
        return "none"
    if how.granularity == "selective":
        return "selective " + " ".join(how.modules)
    return f"full, {how.method or 'uniform'} {how.num_layers or 1}" + (", distributed" if how.distribute else "")


# ---- a pipeline ----------------------------------------------------------------------------------------------------------------


class KeepsOutput(nn.Module):
    """A stage that keeps what it put out until its backward, as a pipeline does that does not free sent outputs."""

    def __init__(self, stage: GPT) -> None:
        super().__init__()
        self.stage = stage
        self.input_shape, self.output_shape, self.loss = stage.input_shape, stage.output_shape, stage.loss

    def forward(self, x: Tensor | None, microbatch: MicroBatch) -> Tensor:
        return apply(_Keep, self.stage(x, microbatch))


class _Keep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def measure_step(
    schedule: Schedule, chunks: Sequence[nn.Module], microbatches: Sequence[MicroBatch], group: Group
) -> ActivationMemory:
    """Run a schedule under the microscope. Collective over ``group``; gradients add up."""
    loss: Any = chunks[-1].loss
    with activation_memory(nn.ModuleList(chunks)) as memory:
        run(schedule, chunks, microbatches, group=group, loss=loss, normaliser=1.0)
    return memory


def part_of(saved: SavedTensor) -> str:
    """ "layers", "ends" (embedding, last norm, head, loss) or "statistics"."""
    if saved.statistic:
        return "statistics"
    return "layers" if "layers" in saved.module.split(".") else "ends"


def stage_row(memory: ActivationMemory, schedule: Schedule, rank: int, chunk: float, extra: float = 0) -> Row:
    """What the layers of a rank held at their peak. No collective.

    Args:
        chunk: bytes that the layers of one chunk hold for one micro-batch, see :func:`layers_formula`.
        extra: bytes that are there once, e.g. the insides of a layer that is replayed.
    """
    parts = memory.grouped(part_of)
    peak, statistics = (parts[name].peak if name in parts else 0 for name in ("layers", "statistics"))
    in_flight = prove(schedule).peak_in_flight[rank]
    return Row(f"rank {rank}, {in_flight} in flight", peak, in_flight * chunk + extra, statistics)


def gather_rows(row: Row, group: Group) -> list[Row]:
    """The rows of all ranks, on each. Collective over ``group``."""
    return [Row(*values) for values in group.all_gather_json([row.what, row.measured, row.formula, row.statistics])]
