"""Weights that change while micro-batches are in flight: PipeDream stashes versions, PipeDream-2BW keeps two.

F and B of a micro-batch must see the same weights, or the gradient is that of no function at all. So weights are never changed in
place: an update makes a new *version*, and a micro-batch is carried through F and B by the version it began with.

    "each"   PipeDream: F takes the newest version; every B makes the next one from its own gradient.
                 w(t+1) = w(t) - lr * grad f(w1(t-n+1), w2(t-n+2), ..., wn(t)),  n stages, versions clamped at 0
             In flight are p - r micro-batches on rank r, and as many versions; two on the last, where an update needs old and new.
    "2bw"    the gradients of p micro-batches make one update, and micro-batch k = 0, 1, ... uses version max(k // p - 1, 0):
                 w(t+1) = w(t) - lr * grad f(w(t-1))
             The newest and the one before it: two versions, whatever p is.

There is no moment at which all gradients are ready, so nothing can be done with them together: no sum over data-parallel ranks, no
global norm, no tied embedding whose two copies are to stay equal. All that is refused.

Sources: Harlap et al. 2018, arXiv 1806.03377, section 3.3; Narayanan et al. 2020, arXiv 2006.09503, section 3.1.
See it run: ``notebooks/08_pipedream.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from minimeg.schedule import Schedule

Version = dict[str, Tensor]  # the chunk's parameters by their name in the module


class _Call(nn.Module):
    """``functional_call`` swaps the weights of a module while its forward runs; this one's forward does whatever is asked."""

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, do: Callable[[], Any]) -> Any:
        return do()


class Stash:
    """The weight versions of one chunk during one run. Plain SGD.

    Args:
        updates: "each" or "2bw", as in a Schedule.
        accumulate: micro-batches whose gradients make one update under "2bw".
        microbatches: of the whole run; the last one makes an update even if its group is short.
    """

    def __init__(
        self, chunk: nn.Module, updates: str, accumulate: int, microbatches: int, learning_rate: float
    ) -> None:
        self.chunk, self.learning_rate = chunk, learning_rate
        self.accumulate = 1 if updates == "each" else accumulate
        self.delayed = updates == "2bw"
        self.last = microbatches - 1
        self.trained = {name for name, param in chunk.named_parameters() if param.requires_grad}
        self.versions: dict[int, Version] = {0: {name: param.detach() for name, param in chunk.named_parameters()}}
        self.newest = 0
        self.used_by: dict[int, int] = {}  # micro-batch in flight -> version
        self.gradient: dict[str, Tensor] = {}
        self.peak_versions = 1
        self._leaves: dict[int, Version] = {}  # by micro-batch in flight
        self._call = _Call(chunk)

    def forward(self, index: int, x: Tensor | None, microbatch: Any) -> Tensor:
        """The chunk's output for micro-batch ``index`` under the version that is its own."""
        version = _double_buffered(index, self.accumulate) if self.delayed else self.newest
        self.used_by[index] = version
        # Leaves of its own, so that the gradients of micro-batches do not mix; no memory is copied.
        self._leaves[index] = {
            name: weight.detach().requires_grad_(name in self.trained)
            for name, weight in self.versions[version].items()
        }
        output: Tensor = self._under(index, lambda: self.chunk(x, microbatch))
        return output

    def backward(self, index: int, backward: Callable[[], None]) -> None:
        """Call ``backward`` under the version of the forward (recomputation runs the chunk again), and take the gradient of
        micro-batch ``index``; when its group is complete, make the next version."""
        self._under(index, backward)
        del self.used_by[index]
        for name, leaf in self._leaves.pop(index).items():
            if leaf.grad is not None:
                self.gradient[name] = self.gradient[name] + leaf.grad if name in self.gradient else leaf.grad
        self._forget(after=index)
        if (index + 1) % self.accumulate == 0 or index == self.last:
            self._update()

    def _under(self, index: int, do: Callable[[], Any]) -> Any:
        weights = {f"chunk.{name}": weight for name, weight in self._leaves[index].items()}
        return functional_call(self._call, weights, (do,))

    def _forget(self, after: int) -> None:
        """Drop the versions that no micro-batch uses or will use. ``after``: the last whose backward is done."""
        coming = _double_buffered(after + 1, self.accumulate) if self.delayed and after < self.last else self.newest
        needed = {self.newest, *self.used_by.values(), *range(coming, self.newest)}
        self.versions = {number: weights for number, weights in self.versions.items() if number in needed}

    def _update(self) -> None:
        weights = self.versions[self.newest]
        self.newest += 1
        self.versions[self.newest] = {
            name: weight - self.learning_rate * self.gradient[name] if name in self.gradient else weight
            for name, weight in weights.items()
        }
        self.gradient = {}
        self.peak_versions = max(self.peak_versions, len(self.versions))

    def finish(self) -> None:
        """Give the chunk its newest weights."""
        with torch.no_grad():
            for name, param in self.chunk.named_parameters():
                param.copy_(self.versions[self.newest][name])


def _double_buffered(index: int, accumulate: int) -> int:
    """The version of micro-batch ``index`` under 2BW."""
    return max(index // accumulate - 1, 0)


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def stash_faults(
    schedule: Schedule, chunks: Sequence[nn.Module], learning_rate: float | None, reduces: bool
) -> list[str]:
    """What forbids updates during a run; one sentence each."""
    faults = []
    if learning_rate is None or not 0 < learning_rate < float("inf"):
        faults.append(
            f"learning_rate={learning_rate} must be a positive number, e.g. 0.1: this schedule updates while it runs"
        )
    if reduces:
        faults.append(
            "on_gradients_ready or before_last_backward is given, but there is no moment at which all gradients are ready; data "
            "parallelism, clipping and ZeRO need a schedule with a flush, e.g. 1f1b"
        )
    if schedule.split or schedule.forward_only:
        faults.append(
            f"updates={schedule.updates!r} goes with F and B only: an update follows each whole backward; use updates=flush, or "
            "leave W out"
        )
    elif schedule.updates == "2bw":
        faults += _double_buffer_faults(schedule)
    return faults + _tied_faults(schedule, chunks)


def _double_buffer_faults(schedule: Schedule) -> list[str]:
    """2BW takes gradients in groups of p micro-batches, and a group's version must exist when its first forward begins."""
    p, m = schedule.stages, schedule.microbatches
    if m < p:
        return [f"updates='2bw' needs the gradients of {p} micro-batches, one a stage, for an update, got {m}; use {p}"]
    for rank, row in enumerate(schedule.ranks):
        done = [0] * schedule.chunks
        for kind, index, chunk in row:
            needed = _double_buffered(index, p) * p if kind == "F" else index
            if done[chunk] < needed:
                where = f"rank {rank}: {kind}{chunk}.{index} stands before B{chunk}.{done[chunk]}"
                return [
                    f"{where}, but updates='2bw' makes its versions from backwards in order, two groups of {p} ahead"
                ]
            done[chunk] += kind == "B"
    return []


def _tied_faults(schedule: Schedule, chunks: Sequence[nn.Module]) -> list[str]:
    """Only the ranks that hold a copy can say so. The others wait for a message that is never sent, until those have failed."""
    if schedule.virtual_stages == 1:
        return []
    named = [(c, name, param) for c, chunk in enumerate(chunks) for name, param in chunk.named_parameters()]
    shards = [getattr(param, "shard", None) for _, _, param in named]
    tied = {shard.name for shard in shards if shard is not None and (shard.tied or shard.tied_to)}
    owner: dict[int, int] = {}
    tied |= {name for c, name, param in named if owner.setdefault(id(param), c) != c}
    return [f"{', '.join(sorted(tied))} is tied over stages, whose versions differ; use an untied head"] if tied else []
