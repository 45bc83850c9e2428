"""Tensor parallelism over two ranks against DTensor: eight transformer layers, forward and backward of each micro-batch.

DTensor's plan is the best known: one fused QKV, so that its input is replicated once; column, then row; local tensors between the
layers. All-reduces are counted from outside by a dispatch mode, the same for both. Equal: every gradient, gathered, and that of
the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from minimeg.lab.ranks import Ranks
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.parallel_state import initialize_model_parallel
from minimeg.parameter import full_state, initialise
from tests.benchmarks.counting import CommunicationCounter
from tests.benchmarks.plain_gpt import SEED, PlainGPT, largest_gap
from tests.benchmarks.table import Row
from tests.benchmarks.timing import ratio, spread, take_turns

CONFIG = GPTConfig(8, 256, 8, 512, 64, tied=False)
TP, MICROBATCHES, SIZE = 2, 8, 2
_CLOSE = 1e-5

LAYER_PLAN = {
    "self_attention.linear_qkv": ColwiseParallel(),
    "self_attention.linear_proj": RowwiseParallel(),
    "mlp.linear_fc1": ColwiseParallel(),
    "mlp.linear_fc2": RowwiseParallel(),
}


def parallelise_layers(model: PlainGPT, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        parallelize_module(layer, mesh, LAYER_PLAN)


def dense(x: Tensor) -> Tensor:
    """The whole tensor, whatever it is: DTensor's gathers are collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


class _Contender:
    """A stack of layers and its inputs."""

    def __init__(self, model: GPT | PlainGPT, config: GPTConfig, microbatches: int) -> None:
        self.layers, self.bias = model.layers, model.causal_bias
        generator = torch.Generator().manual_seed(5)
        shape = (microbatches, config.max_sequence_length, SIZE, config.hidden_size)
        self.inputs = [nn.Parameter(x) for x in torch.randn(shape, generator=generator)]

    def step(self) -> None:
        for x in self.inputs:
            y: Tensor = x
            for layer in self.layers.values():
                y = layer(y, self.bias, None) if self.is_ours else layer(y, self.bias)
            y.square().sum().backward()

    is_ours = False

    def forget(self) -> None:
        self.layers.zero_grad()
        for x in self.inputs:
            x.grad = None

    def all_reduces(self) -> int:
        with CommunicationCounter() as seen:
            self.step()
        return seen.counts["allreduce"]


class _Minimeg(_Contender):
    is_ours = True

    def __init__(self, config: GPTConfig, microbatches: int) -> None:
        self.state = initialize_model_parallel(tensor_model_parallel_size=TP)
        model = GPT(config, self.state.tp)
        initialise(model, SEED)
        self.model = model
        super().__init__(model, config, microbatches)

    def gradients(self) -> dict[str, Tensor]:
        found = full_state(self.model, self.state, lambda param: param.grad)
        return {name: grad for name, grad in found.items() if name.startswith("layers.")}


class _DTensor(_Contender):
    def __init__(self, config: GPTConfig, microbatches: int) -> None:
        model = PlainGPT(config)
        parallelise_layers(model, init_device_mesh("cpu", (TP,)))
        super().__init__(model, config, microbatches)

    def gradients(self) -> dict[str, Tensor]:
        return {f"layers.{name}": dense(param.grad) for name, param in self.layers.named_parameters()}


def measure(config: GPTConfig, microbatches: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int], float]:
    """-> times and all-reduces a step by contender, and the largest gap between their gradients."""
    contenders = {"ours": _Minimeg(config, microbatches), "DTensor": _DTensor(config, microbatches)}
    times = take_turns(
        {name: each.step for name, each in contenders.items()},
        rounds,
        {name: each.forget for name, each in contenders.items()},
    )
    found = [
        each.gradients() | {str(i): dense(x.grad) for i, x in enumerate(each.inputs)} for each in contenders.values()
    ]
    gap = torch.tensor(largest_gap(*found))
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    return times, {name: each.all_reduces() for name, each in contenders.items()}, float(gap)


def rows(
    rounds: int, pool: Callable[[int], Ranks], config: GPTConfig = CONFIG, microbatches: int = MICROBATCHES
) -> Iterator[Row]:
    times, counts, gap = pool(TP).call(measure, config, microbatches, rounds, timeout=300)[0]
    if gap > _CLOSE:
        raise RuntimeError(f"gradients of minimeg and DTensor differ by {gap:.1e} of the largest")
    least = 4 * config.num_layers * microbatches
    if counts["ours"] != least:
        raise RuntimeError(f"{counts['ours']} all-reduces, not 4 a layer and micro-batch: {least}")
    found = ratio(times["ours"], times["DTensor"])
    yield Row(
        section="tensor parallel",
        setting=f"tp={TP}, {config.num_layers} layers, h={config.hidden_size}, s={config.max_sequence_length}, b={SIZE}, "
        f"m={microbatches}",
        unit="s",
        values={name: spread(each) for name, each in times.items()},
        ratios={"ours / DTensor": found},
        equal=f"all gradients within {_CLOSE:.0e} of the largest",
        reach=f"exactly {least} all-reduces, and at most 0.70 x DTensor's best plan",
        met=found.median <= 0.70,
        notes=f"all-reduces a step: ours {counts['ours']}, DTensor {counts['DTensor']}",
    )
