"""A piece of a tensor: what one rank holds of it, and how all pieces become the whole.

A tensor of the model is known by its kind and its global name: ``parameter/layers.7.mlp.linear_fc1.weight``,
``exp_avg/layers.7.mlp.linear_fc1.weight``. Tensor parallelism cuts it along a dimension (a Shard says which part this is); ZeRO-1
cuts that part again, into ranges of its flattened elements. Both cuts are written down with each piece, so that any other layout can
put the whole together and cut it anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from minimeg.parameter import Shard


@dataclass(frozen=True, eq=False)
class Entry:
    """The elements [start, end) of the flattened local shard of one tensor.

    Attributes:
        kind: "parameter", or a tensor of the optimizer that has the parameter's shape: "main", "exp_avg", "exp_avg_sq".
        tensor: end - start elements, of any shape. Loading writes into it.
        replicated: every data-parallel rank holds the same, so one of them writes it; False under ZeRO, where each piece exists once.
    """

    kind: str
    shard: Shard
    tensor: Tensor
    start: int = 0
    end: int | None = None
    replicated: bool = True

    @property
    def stop(self) -> int:
        return prod(self.shard.shape) if self.end is None else self.end

    @property
    def name(self) -> str:
        """Copies of a tied parameter share one name: that of the original."""
        return f"{self.kind}/{self.shard.tied_to or self.shard.name}"

    def describe(self, key: str) -> dict[str, Any]:
        """As JSON, for the manifest. ``key``: of the tensor in its file."""
        shard = self.shard
        return {
            "name": self.name,
            "shape": list(shard.full_shape),
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "piece": {
                "key": key,
                "dim": shard.dim,
                "index": shard.index,
                "parts": shard.parts,
                "padded": shard.padded,
                "start": self.start,
                "end": self.stop,
            },
        }

    def of(self, full: Tensor) -> Tensor:
        """This piece, cut out of the whole tensor; of this entry's shape."""
        return self.shard.cut(full).view(-1)[self.start : self.stop].view(self.tensor.shape)


def shard_of(piece: dict[str, Any], name: str, shape: list[int]) -> Shard:
    return Shard(name, tuple(shape), piece["dim"], piece["index"], piece["parts"], piece["padded"])


def join(name: str, shape: list[int], pieces: list[tuple[dict[str, Any], Tensor]]) -> Tensor:
    """The whole tensor from all its pieces, in any order. They are known to cover it (manifest.py)."""
    by_part: dict[int, list[tuple[int, Tensor]]] = {}
    for piece, tensor in pieces:
        by_part.setdefault(piece["index"], []).append((piece["start"], tensor.reshape(-1)))
    shard = shard_of(pieces[0][0], name, shape)
    parts = [
        torch.cat([tensor for _, tensor in sorted(ranges, key=lambda item: item[0])]).view(shard.shape)
        for _, ranges in sorted(by_part.items())
    ]
    return parts[0] if shard.dim is None else shard.join(torch.cat(parts, shard.dim))
