"""A failure on purpose: ``MINIMEG_FAULT=rank:step:phase:kind``, for tests and for whoever wants to see what happens.

    2:3:forward:kill         rank 2 is killed when it begins the first forward of step 3 (counted from 0)
    0:5:message-wait:stop    rank 0 stops (SIGSTOP) when it begins to wait for a message
    1:0:optimizer:slow=8     rank 1 sleeps 8 s; nothing should fail
    3:2:backward:nan         a gradient of rank 3 is spoilt in step 2

See it run: ``MINIMEG_FAULT=2:3:forward:kill python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from minimeg.faults.blackbox import PHASES, BlackBox

KINDS = ("kill", "raise", "exit", "stop", "slow", "nan", "corrupt")


class InjectedFault(RuntimeError):
    """What ``MINIMEG_FAULT=...:raise`` raises."""


@dataclass(frozen=True)
class Fault:
    """One rank fails once, when it enters ``phase`` of ``step`` (counted from 0).

    kill: SIGKILL. raise: an exception. exit: ``os._exit(0)``, as if all were well. stop: SIGSTOP. slow: sleeps for ``seconds``.
    nan: the first gradient that is reduced next holds a NaN. corrupt: a byte of the next file of a checkpoint is flipped.
    """

    rank: int
    step: int
    phase: str
    kind: str
    seconds: float = 3.0

    @classmethod
    def parse(cls, text: str, world_size: int) -> Fault:
        """From "rank:step:phase:kind"; "slow=8" sleeps 8 s. ValueError with everything that is wrong."""
        example = 'MINIMEG_FAULT is rank:step:phase:kind, e.g. "1:3:forward:kill"'
        parts = text.split(":")
        if len(parts) != 4:
            raise ValueError(f"{example}; got {text!r}")
        rank, step, phase, (kind, _, seconds) = (
            *parts[:2],
            parts[2].replace("-", " ").replace("_", " "),
            parts[3].partition("="),
        )
        wrong = []
        if not rank.isdecimal() or int(rank) >= world_size:
            wrong.append(f"rank must lie in 0..{world_size - 1}, got {rank!r}")
        if not step.isdecimal():
            wrong.append(f"step must be 0 or more, got {step!r}")
        if phase not in PHASES[1:]:  # "start" lies before the first step
            wrong.append(f"phase must be one of {', '.join(PHASES[1:])}, got {phase!r}")
        if kind not in KINDS:
            wrong.append(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if seconds and (kind != "slow" or not seconds.replace(".", "", 1).isdecimal()):
            wrong.append(f"only slow takes seconds, as in slow=8, got {parts[3]!r}")
        if wrong:
            raise ValueError(f"{example}; {'; '.join(wrong)}")
        return cls(int(rank), int(step), phase, kind, float(seconds or 3.0))

    @classmethod
    def from_environment(cls, world_size: int) -> Fault | None:
        """None without MINIMEG_FAULT. After a restart by torchrun there is no fault: the second attempt is to succeed."""
        text = os.environ.get("MINIMEG_FAULT", "")
        fault = cls.parse(text, world_size) if text else None
        return fault if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else None

    def strike(self, box: BlackBox) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "raise":
            raise InjectedFault(f"MINIMEG_FAULT at step {self.step}, phase {self.phase}")
        elif self.kind == "exit":
            os._exit(0)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind in ("nan", "corrupt"):
            box.planted.add(self.kind)  # whoever holds the gradient, or the file, takes it from there
        else:
            time.sleep(self.seconds)


def armed(box: BlackBox, fault: Fault) -> Callable[[int, str], None]:
    """What ``box.on_enter`` is to call: it strikes once, at the fault's step and phase."""

    def react(step: int, phase: str) -> None:
        if (step, phase) == (fault.step, fault.phase):
            box.on_enter.remove(react)
            fault.strike(box)

    return react
