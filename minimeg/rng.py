"""Random streams by key: every draw is a pure function of *what it is for*, never of what was drawn before.

Megatron-LM keeps stateful generators ("data-parallel-rng", "model-parallel-rng") that must be forked, saved and restored around
every recomputation. Here a draw names itself: (seed, stream, step, micro-batch, layer, call, tensor-parallel index), a hash of
that seeds a fresh generator (a few microseconds), and the questions answer themselves:

* Recomputation draws the same mask again: the key is the same.
* Another pipeline split or schedule gives the same masks: the layer's index is global and no order of execution enters.
* Data-parallel ranks differ: the micro-batch is its index in the *global* batch.
* Nothing needs saving in a checkpoint.

Which ranks share a mask is decided in one place, :func:`dropout`:

    tensor                                     mask
    replicated over tp ([s, b, h])             same inside a tp group (each rank holds a copy of one tensor)
    cut over tp (attention heads, [s/t, b, h]) different inside a tp group (each rank holds another part)

See it run: ``notebooks/11_recomputation.ipynb``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minimeg.comm import Group


@dataclass(frozen=True)
class Key:
    """The name of a random draw. ``microbatch`` is an index in the global batch, ``layer`` is global, ``call`` counts the
    draws inside a layer, ``tp`` is 0 where all ranks of a tensor-parallel group must draw alike."""

    seed: int
    stream: str = "dropout"
    step: int = 0
    microbatch: int = 0
    layer: int = 0
    call: int = 0
    tp: int = 0

    def at(self, **fields: Any) -> Key:
        """The same key with some fields replaced: ``key.at(layer=3, call=1)``."""
        return replace(self, **fields)

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh generator that is seeded by this key alone."""
        name = "/".join(map(str, (self.seed, self.stream, self.step, self.microbatch, self.layer, self.call, self.tp)))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        real = (
            "cpu" if torch.device(device).type == "meta" else device
        )  # a dry run draws nothing, but wants a generator
        return torch.Generator(real).manual_seed(int.from_bytes(digest, "big") >> 1)  # 63 bits: manual_seed is signed


def dropout_mask(
    shape: torch.Size, p: float, key: Key, device: torch.device, *, group: Group | None, dim: int, whole: bool
) -> Tensor:
    """True where an element stays: probability 1 - p, bool, one byte an element. See :func:`dropout`."""
    if group is None or group.size == 1:
        return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=key.generator(device))
    if not whole:
        own = key.at(tp=group.rank).generator(device)
        return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=own)
    full_shape = list(shape)
    full_shape[dim] *= group.size
    full = torch.empty(full_shape, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=key.generator(device))
    return full.chunk(group.size, dim)[group.rank].contiguous()


def dropout(
    x: Tensor, p: float, key: Key | None, *, group: Group | None = None, dim: int = 0, whole: bool = False
) -> Tensor:
    """Zero each element with probability p and scale the others by 1/(1 - p). Keeps one byte an element for backward.

    Args:
        key: the name of the draw; None (evaluation) leaves ``x`` as it is.
        group, dim: ``x`` is this rank's slice along ``dim`` of a tensor cut over ``group``; without a group it is replicated.
        whole: draw the mask of the full tensor and slice it, so that any layout equals one process. For checking: every rank
            then pays for the full mask.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability must lie in [0, 1), got {p}")
    if p == 0 or key is None:
        return x
    mask = dropout_mask(x.shape, p, key, x.device, group=group, dim=dim, whole=whole)
    for seen in _RECORDS:
        seen.append((key, mask))
    return x * mask * (1 / (1 - p))  # autograd keeps the mask only


# ---- who draws alike? ----------------------------------------------------------------------------------------------------------

_RECORDS: list[list[tuple[Key, Tensor]]] = []


@contextmanager
def recorded_masks() -> Iterator[list[tuple[Key, Tensor]]]:
    """Every mask that this process draws until the block ends, replays included, in order, each with its key (tp left at 0)."""
    seen: list[tuple[Key, Tensor]] = []
    _RECORDS.append(seen)
    try:
        yield seen
    finally:
        _RECORDS[:] = [other for other in _RECORDS if other is not seen]


def agreement(mask: Tensor, group: Group) -> list[list[float]]:
    """In which part of its elements does each rank's mask agree with each other rank's? Collective; masks of equal size.

    1 for the same mask; for independent ones p^2 + (1 - p)^2, which is 1/2 at p = 0.5 and 0.82 at p = 0.1.
    """
    everyone = group.all_gather(mask.flatten().to(torch.uint8)).view(group.size, -1)
    return [[float((one == other).double().mean()) for other in everyone] for one in everyone]
