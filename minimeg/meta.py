"""Tensors without values. On torch's "meta" device everything has a shape and nothing a number: what a dry run computes with.

See it run: ``python -m minimeg.train --dry-run --world-size 8 --rank 5 --tp 2 --pp 2``.
"""

from __future__ import annotations

import math

from torch import Tensor


def number(x: Tensor) -> float:
    """The value of a tensor of one element; NaN where there is none."""
    return math.nan if x.is_meta else float(x)


def numbers(x: Tensor) -> list[float]:
    """The values of a vector; NaN each where there are none."""
    return [math.nan] * x.numel() if x.is_meta else [float(value) for value in x.tolist()]
