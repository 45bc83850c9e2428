"""The one typed door to ``torch.autograd.Function.apply``, which torch leaves untyped.

A Function's saved tensors reach autograd when its forward is over. One that knows them before, and is dear to run, says so: the
class attribute ``saves`` gives their positions among the arguments. A replay that wanted nothing else then stops in front of it
(:mod:`minimeg.recompute`), as it does in front of torch's own products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

# The replays under way, the innermost last: each is told what is about to be saved.
REPLAYS: list[Callable[[Sequence[Tensor]], None]] = []


def apply(function: type[Function], *args: Any) -> Tensor:
    """``function.apply(*args)`` for a Function with one output tensor."""
    saves: tuple[int, ...] = getattr(function, "saves", ())
    if saves and REPLAYS and torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        REPLAYS[-1]([args[position] for position in saves])
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]
