"""Half precision: which sums must be wide, how fp16 is kept from vanishing, and what is done about a number that is none.

    bf16    8 bits of range, 8 of precision:   1 + 1/256 = 1.    Needs float32 sums and float32 main parameters.
    fp16    5 bits of range, 11 of precision:  2^-25 = 0.        Needs those too, and gradients that are not too small.

**Loss scaling** (Micikevicius et al. 2017, section 3.2). Gradients of 2^-25 and less vanish in fp16, while the range above is
empty. The loss is multiplied by S = 2^16, and so is every gradient; the optimizer divides by S in float32, where nothing is lost. If
S is too large, something overflows to inf: that step is skipped *on every rank*, and S is halved; after many good steps it is doubled.

One rank that skips alone is one step behind for ever, with no error (fairseq2 issue 1374). So the decision is one number that all
ranks sum before anybody acts (gradient_norm.py).

Megatron-LM: ``DynamicGradScaler``. See it run: ``python -m minimeg.train --dtype float16``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

ON_NONFINITE = ("stop", "skip")


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite. Raised on every rank alike, with the same sentence."""


@dataclass
class LossScaler:
    """A power of two that the loss is multiplied by; it finds its own size.

    Args:
        scale: to begin with.
        growth: it is multiplied by this after ``interval`` steps without an overflow, and by ``backoff`` after each overflow, but
            stays between ``minimum`` and ``maximum``.
        good_steps: steps without an overflow since the scale last changed.

    Raises:
        ValueError: all that is wrong. Powers of two only: then scaling changes no digit.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 1000
    minimum: float = 1.0
    maximum: float = 2.0**32
    good_steps: int = 0

    def __post_init__(self) -> None:
        faults = [
            f"{name}={getattr(self, name)} must be a power of two, e.g. {getattr(LossScaler, name):g}"
            for name in ("scale", "growth", "backoff", "minimum", "maximum")
            if not (0 < getattr(self, name) < math.inf and math.frexp(getattr(self, name))[0] == 0.5)
        ]
        if not self.growth >= 1 >= self.backoff:
            faults.append(
                f"growth={self.growth} must be at least 1 and backoff={self.backoff} at most 1, e.g. 2 and 0.5"
            )
        if not self.minimum <= self.scale <= self.maximum:
            faults.append(f"scale={self.scale} must lie in {self.minimum}..{self.maximum}")
        if self.interval < 1 or self.good_steps < 0:
            faults.append(f"interval={self.interval} must be at least 1, and good_steps={self.good_steps} at least 0")
        if faults:
            raise ValueError("this loss scaler cannot work:\n  " + "\n  ".join(faults))

    @property
    def can_back_off(self) -> bool:
        """False at the minimum: an overflow there is not the scale's fault."""
        return self.scale > self.minimum and self.backoff < 1

    def update(self, overflow: bool) -> None:
        """After each step, with the decision that all ranks took together."""
        if overflow:
            self.scale, self.good_steps = max(self.minimum, self.scale * self.backoff), 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale, self.good_steps = min(self.maximum, self.scale * self.growth), 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a manifest in JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError, and nothing changed, for unknown or missing numbers, or such as the constructor refuses."""
        names = {field.name for field in fields(self)}
        if state.keys() != names:
            raise ValueError(f"a loss scaler's state has {sorted(names)}, got {sorted(state)}")
        self.__dict__.update(vars(LossScaler(**state)))
