"""What a run leaves behind: a line of numbers a step, in files that any tool reads.

    RUN/run.json         the flags and the layout
    RUN/metrics.jsonl    one JSON object a step: step, loss, norm, learning_rate, seconds, tokens_per_second, wire_bytes and, where
                         known, validation_loss, bubble (measured, of the total time), model_flops_utilisation
    RUN/timeline.svg     the measured timeline of the last step above the simulated one
    RUN/events...        the same numbers for TensorBoard, if it is installed (the extra ``log``)

A run that is resumed goes on writing behind what is there; of a step that was done twice the last line counts.

See it run: ``python -m minimeg.train --run-dir out/run``, then ``python -m minimeg.report out/run``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

METRICS, RUN, TIMELINE = "metrics.jsonl", "run.json", "timeline.svg"


class Records:
    """Writes a run's numbers; one rank of a run has one. ``folder=None`` writes nothing."""

    def __init__(self, folder: Path | None, about: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._events: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN).write_text(json.dumps(about or {}, indent=1, default=str) + "\n", encoding="utf-8")
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # the extra `log` is not installed: the JSON lines hold the same
            return
        self._events = SummaryWriter(str(folder))

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """``step``: steps done. None and numbers that JSON cannot hold (inf, NaN) are written as null."""
        if self.folder is None:
            return
        finite = {name: x if x is not None and math.isfinite(x) else None for name, x in numbers.items()}
        self._metrics.write(json.dumps({"step": step, **finite}) + "\n")
        self._metrics.flush()  # a run that is killed has written what it did
        if self._events is not None:
            for name, number in finite.items():
                if number is not None:
                    self._events.add_scalar(name, number, step)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder is not None:
            self._metrics.close()
        if self._events is not None:
            self._events.close()


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """The lines of a run in order of steps, each step once.

    Raises:
        ValueError: there is no such file, or a line before the last is not JSON. (A last line cut short by a kill is left out.)
    """
    path = folder / METRICS
    if not path.is_file():
        raise ValueError(f"{folder} holds no {METRICS}; a run writes it with --run-dir {folder}")
    found: dict[int, dict[str, float | None]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            step = int(entry["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a line of metrics ({error})") from error
        found[step] = entry
    return [found[step] for step in sorted(found)]
