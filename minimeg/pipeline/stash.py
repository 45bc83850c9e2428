"""Weights that change while micro-batches are in flight: PipeDream stashes versions, PipeDream-2BW keeps two.

F and B of a micro-batch must see the same weights, or the gradient is that of no function at all. So weights are never changed in
place: an update makes a new *version*, and a micro-batch is carried through F and B by the version it began with.

    "each"   PipeDream: F takes the newest version; every B makes the next one from its own gradient.
                 w(t+1) = w(t) - lr * grad f(w1(t-n+1), w2(t-n+2), ..., wn(t)),  n stages, versions clamped at 0
             In flight are p - r micro-batches on rank r, and as many versions.
    "2bw"    the gradients of p micro-batches make one update, and micro-batch k = 0, 1, ... uses version max(k // p - 1, 0):
                 w(t+1) = w(t) - lr * grad f(w(t-1))
             The newest and the one before it: two versions, whatever p is.

Sources: Harlap et al. 2018, arXiv 1806.03377, section 3.3; Narayanan et al. 2020, arXiv 2006.09503, section 3.1.
See it run: ``notebooks/08_pipedream.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from minimeg.parameter import named_shards

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
        self._leaves: dict[int, Version] = {}
        self._call = _Call(chunk)

    def forward(self, index: int, x: Tensor | None, microbatch: Any) -> Tensor:
        """The chunk's output for micro-batch ``index`` under the version that is its own."""
        version = max(index // self.accumulate - 1, 0) if self.delayed else self.newest
        self.used_by[index] = version
        weights = {
            name: weight.detach().requires_grad_(name in self.trained)
            for name, weight in self.versions[version].items()
        }
        self._leaves[index] = (
            weights  # of its own, so that the gradients of micro-batches do not mix; no memory is copied
        )
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
        if (index + 1) % self.accumulate == 0 or index == self.last:
            self._update()
        self._forget(after=index)

    def _under(self, index: int, do: Callable[[], Any]) -> Any:
        weights = {f"chunk.{name}": weight for name, weight in self._leaves[index].items()}
        return functional_call(self._call, weights, (do,))

    def _update(self) -> None:
        weights = self.versions[self.newest]
        self.newest += 1
        self.versions[self.newest] = {
            name: weight - self.learning_rate * self.gradient[name] if name in self.gradient else weight
            for name, weight in weights.items()
        }
        self.gradient = {}
        self.peak_versions = max(self.peak_versions, len(self.versions))

    def _forget(self, after: int) -> None:
        """Drop the versions that no micro-batch uses or will use. ``after``: the last whose backward is done."""
        coming = max((after + 1) // self.accumulate - 1, 0) if self.delayed else self.newest
        needed = {self.newest, *self.used_by.values(), *range(coming, self.newest)}
        self.versions = {number: weights for number, weights in self.versions.items() if number in needed}

    def finish(self) -> None:
        """Give the chunk its newest weights."""
        with torch.no_grad():
            for name, param in self.chunk.named_parameters():
                param.copy_(self.versions[self.newest][name])


def stash_faults(chunks: list[nn.Module], stages: int, learning_rate: float | None, reduces: bool) -> list[str]:
    """What forbids updates during a run; one sentence each."""
    faults = []
    if learning_rate is None or not 0 < learning_rate < float("inf"):
        faults.append(
            f"learning_rate={learning_rate} must be a positive number, e.g. 0.1: this schedule updates while it runs"
        )
    if reduces:
        faults.append(
            "on_gradients_ready is given, but there is no moment at which all gradients are ready; data parallelism, clipping and "
            "ZeRO need a schedule with a flush, e.g. 1f1b"
        )
    tied = sorted(shard.name for _, _, shard in _shards(chunks) if stages > 1 and (shard.tied or shard.tied_to))
    if tied:
        faults.append(f"{', '.join(tied)} is tied over stages, whose versions differ; use an untied head")
    return faults


def _shards(chunks: list[nn.Module]) -> list[Any]:
    described = [chunk for chunk in chunks if all(hasattr(param, "shard") for param in chunk.parameters())]
    return list(named_shards(described))
