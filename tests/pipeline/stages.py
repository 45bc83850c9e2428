"""Small stages whose every number can be followed: a parallel linear and a tanh, in float64."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minimeg.comm import Group, Pending
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
    """Which micro-batches' activations are held in which chunk? Seen by hooks on what autograd saves, not by the executor's counter.

    A saved tensor gets memory of its own, whose release is noticed. Most is released with B; what a deferred weight gradient needs
    lives on until W.
    """

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
        def pack(x: Tensor) -> Tensor:
            self.held[slot] = self.held.get(slot, 0) + 1
            self.peak = max(self.peak, len(self.held))
            saved = x.detach().clone()
            weakref.finalize(saved.untyped_storage(), self._let_go, slot).atexit = False
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved):
            yield

    def _let_go(self, slot: tuple[int, int]) -> None:
        self.held[slot] -= 1
        if self.held[slot] == 0:
            del self.held[slot]


# What a stage may do to its output y, given its input x.
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, y: y,
    "part": lambda x, y: torch.cat([y, y + 1], -1)[..., :H],  # a view of something larger
    "transposed": lambda x, y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "reshaped": lambda x, y: y.reshape(-1).view(y.shape),
    "expanded": lambda x, y: y.mean(1, keepdim=True).expand(y.shape),  # several elements in one place
    "residual": lambda x, y: x + y,
    "nothing": lambda x, y: x.view(x.shape),  # passes its input on: no parameter takes part
}


class Block(nn.Module):
    """Virtual stage ``number``: tanh(W x + b) * scale. The weights depend on the number alone, so any layout has the same."""

    def __init__(self, number: int, live: Live | None = None, shape: str = "plain") -> None:
        super().__init__()
        self.number, self.live, self.shape = number, live, SHAPES[shape]
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
            return self.shape(x, torch.tanh(self.linear(x)) * self.scale)
        assert x.grad_fn is None, "what is handed over has no history: the graph ends at the stage"
        with self.live.watch((self.number, sample.index)):
            return self.live.see(self.shape(x, torch.tanh(self.linear(x)) * self.scale))


def loss(output: Tensor, sample: Sample) -> Tensor:
    assert output.shape == sample.target.shape
    return (output - sample.target).square().sum()


def chunks_of(schedule: Schedule, rank: int, live: Live | None = None, shape: str = "plain") -> list[Block]:
    return [Block(schedule.virtual_stage(rank, c), live, shape) for c in range(schedule.chunks)]


def gradients(blocks: list[Any]) -> dict[str, Tensor | None]:
    return {f"{block.number}.{name}": param.grad for block in blocks for name, param in block.named_parameters()}


def in_one_process(
    virtual_stages: int, batch: list[Sample], normaliser: float, shape: str = "plain"
) -> tuple[float, dict[str, Tensor | None]]:
    """All stages in a row, micro-batch after micro-batch: plain autograd, nothing of minimeg's pipeline."""
    blocks = [Block(number, shape=shape) for number in range(virtual_stages)]
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        x: Tensor | None = None
        for block in blocks:
            x = block(x, sample)
        assert x is not None
        part = loss(x, sample) / normaliser
        if part.requires_grad:
            part.backward()
        total += part.detach()
    return float(total), gradients(blocks)


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """To the bit; None is equal to None only."""
    return a is b if a is None or b is None else torch.equal(a, b)


@dataclass(eq=False)
class Watched(Group):
    """A group that counts for itself how many of its sends have begun and were not waited for.

    ``one_tag``: all messages go under the same tag, so that only their order tells them apart.
    """

    one_tag: bool = False
    outstanding: int = 0
    peak: int = 0

    def isend(self, x: Tensor, dst: int, tag: int = 0) -> Pending:
        pending = super().isend(x, dst, 0 if self.one_tag else tag)
        self.outstanding += 1
        self.peak = max(self.peak, self.outstanding)

        def finish() -> Tensor:
            sent = pending.wait()
            self.outstanding -= 1
            return sent

        return Pending(finish)

    def irecv(
        self, shape: Any, dtype: torch.dtype, src: int, tag: int = 0, device: torch.device | None = None
    ) -> Pending:
        return super().irecv(shape, dtype, src, 0 if self.one_tag else tag, device)


def watched(group: Group, one_tag: bool = False, in_order: bool = False) -> Watched:
    """``in_order``: as if it were no duplex transport, so that the messages go in the one global order, as over NCCL."""
    names = ("ranks", "rank", "name", "handle", "stage_through_host", "coordinates", "store")
    duplex = group.duplex and not in_order
    return Watched(**{name: getattr(group, name) for name in names}, duplex=duplex, one_tag=one_tag)
