"""Small stages whose every number can be followed: a parallel linear and a tanh, in float64."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minimeg.layers import ColumnParallelLinear
from minimeg.parallel_state import single_process
from minimeg.schedule import Schedule

H = 6


@dataclass(frozen=True)
class Sample:
    """A micro-batch: values that name it, of a length of its own."""

    index: int
    x: Tensor  # [s, b, h]
    target: Tensor


def samples(m: int, unequal: bool = False) -> list[Sample]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(m):
        shape = (3 + (index * 2) % 5 if unequal else 4, 2, H)
        x, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        found.append(Sample(index, x + index, target))
    return found


class Live:
    """Which micro-batches' activations does autograd hold in which chunk? Seen by hooks on what it saves."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}
        self.peak = 0
        self.outputs: list[weakref.ref[Tensor]] = []
        self.kept_outputs = 0

    def see(self, output: Tensor) -> Tensor:
        """Of the outputs before this one none may be alive: what was sent is let go, and the logits are dropped."""
        self.kept_outputs = max(self.kept_outputs, sum(earlier() is not None for earlier in self.outputs))
        self.outputs.append(weakref.ref(output))
        return output

    @contextmanager
    def watch(self, slot: tuple[int, int]) -> Iterator[None]:
        def pack(x: Tensor) -> _Held:
            self.held[slot] = self.held.get(slot, 0) + 1
            self.peak = max(self.peak, len(self.held))
            return _Held(self, slot, x)

        with saved_tensors_hooks(pack, lambda held: held.x):
            yield


class _Held:
    def __init__(self, live: Live, slot: tuple[int, int], x: Tensor) -> None:
        self.live, self.slot, self.x = live, slot, x

    def __del__(self) -> None:
        self.live.held[self.slot] -= 1
        if self.live.held[self.slot] == 0:
            del self.live.held[self.slot]


class Block(nn.Module):
    """Virtual stage ``number``: tanh(W x + b). The weights depend on the number alone, so any layout has the same."""

    def __init__(self, number: int, live: Live | None = None) -> None:
        super().__init__()
        self.number, self.live = number, live
        self.linear = ColumnParallelLinear(H, H, group=single_process().tp).double()
        self.scale = nn.Parameter(torch.ones(H, dtype=torch.float64))  # finishes in B, also where W is put off
        generator = torch.Generator().manual_seed(100 + number)
        with torch.no_grad():
            for param in (self.linear.weight, self.linear.bias):
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4)

    def input_shape(self, sample: Sample) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(sample.x.shape), torch.float64

    output_shape = input_shape

    def forward(self, x: Tensor | None, sample: Sample) -> Tensor:
        if x is None:
            x = sample.x
        if self.live is None:
            return torch.tanh(self.linear(x)) * self.scale
        with self.live.watch((self.number, sample.index)):
            return self.live.see(torch.tanh(self.linear(x)) * self.scale)


def loss(output: Tensor, sample: Sample) -> Tensor:
    assert output.shape == sample.target.shape
    return (output - sample.target).square().sum()


def chunks_of(schedule: Schedule, rank: int, live: Live | None = None) -> list[Block]:
    return [Block(schedule.virtual_stage(rank, c), live) for c in range(schedule.chunks)]


def gradients(blocks: list[Any]) -> dict[str, Tensor]:
    return {f"{block.number}.{name}": param.grad for block in blocks for name, param in block.named_parameters()}


def in_one_process(virtual_stages: int, batch: list[Sample], normaliser: float) -> tuple[float, dict[str, Tensor]]:
    """All stages in a row, micro-batch after micro-batch: plain autograd, nothing of minimeg's pipeline."""
    blocks = [Block(number) for number in range(virtual_stages)]
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        x: Tensor | None = None
        for block in blocks:
            x = block(x, sample)
        assert x is not None
        part = loss(x, sample) / normaliser
        part.backward()
        total += part.detach()
    return float(total), gradients(blocks)
