"""The one typed door to ``torch.autograd.Function.apply``, which torch leaves untyped."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *args: Any) -> Tensor:
    """``function.apply(*args)`` for a Function with one output tensor."""
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]
