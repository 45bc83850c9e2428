"""Where a timeline lies in a picture: the scale of time, the heights of rows, the size of numbers, the shades of chunks.

Numbers only; ``drawing.py`` makes SVG of them. Pure Python.

See it run: ``python -m minimeg.schedule 1f1b --pp 4 --microbatches 8 --svg out.svg``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from statistics import median

from minimeg.schedule.actions import KINDS, Action, Schedule
from minimeg.schedule.timeline import Span, Timeline
from minimeg.svg import BLUE, GREEN, ORANGE, WIDTH, tint

COLOUR = {"F": BLUE, "B": ORANGE, "W": GREEN}
LEFT, RIGHT = 48, 44  # margins, in which the names of the ranks and their peaks stand
DIGIT = 0.64  # width of a digit, in font sizes: that of DejaVu Sans, the widest of the common fonts
FONT_SIZES = (11, 10, 9, 8)
CRISP = 6  # px: blocks of this width or more lie on whole pixels; narrower ones would come out unequal, so on tenths

Panel = tuple[str, Timeline]  # with its title


@dataclass(frozen=True)
class Chart:
    """One timeline of the figure, and where a time lies in it."""

    title: str
    timeline: Timeline
    unit: str  # of time: "s", or "" for slots of a simulation
    px_per_time: float
    grain: int  # blocks lie on whole numbers of 1/grain px
    hatch: str  # how the names of the hatchings begin

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def begin(self) -> float:
        return min((row[0].start for row in self.timeline.spans if row), default=0.0)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        return self.timeline.peak_in_flight

    @property
    def outlined(self) -> bool:
        """From three chunks on, or the lightest shades would look idle."""
        return self.schedule.chunks > 2 and self.grain == 1

    @property
    def gap(self) -> int:
        """Between neighbouring blocks, px; outlines take half of it."""
        return 2 if self.outlined else 1

    @property
    def row(self) -> int:
        """Height of a rank's row, px: 64 ranks must fit, and 2 must not look lost."""
        return max(10, min(26, 352 // self.schedule.stages))

    @property
    def strip(self) -> int:
        """Height of a rank's memory curve, px."""
        return max(8, min(20, 256 // self.schedule.stages))

    @cached_property
    def width(self) -> int:
        return self.px(self.begin + self.timeline.makespan)

    def px(self, time: float) -> int:
        """To the right of LEFT."""
        return round((time - self.begin) * self.px_per_time)

    def places(self, row: Sequence[Span]) -> Iterator[tuple[Action, int, int]]:
        """Each action with its left edge and drawn width in grains. However times round, no block begins before the last one ends."""
        edge = 0
        for action, start, end in row:
            x, right = (round((time - self.begin) * self.px_per_time * self.grain) for time in (start, end))
            x = max(x, edge)
            edge = max(x, right)
            whole = edge - x
            yield action, x, whole - (min(self.gap, whole) if self.grain == 1 else min(self.grain, whole // 6))

    @cached_property
    def font_sizes(self) -> dict[str, int]:
        """Per kind the size at which the longest number fits the typical block, or 0."""
        return self._font_sizes(self.dotted)

    @cached_property
    def dotted(self) -> bool:
        """Whether numbers say the chunk: from three on, if there is room for it; else the shade alone does."""
        return self.schedule.chunks > 2 and all(self._font_sizes(dotted=True).values())

    def _font_sizes(self, dotted: bool) -> dict[str, int]:
        sizes = {}
        digits = len(str(self.schedule.microbatches - 1)) + (1 + len(str(self.schedule.chunks - 1))) * dotted
        for kind in KINDS:
            times = [end - start for row in self.timeline.spans for action, start, end in row if action.kind == kind]
            if times:
                room = median(times) * self.px_per_time - self.gap
                fit = (size for size in FONT_SIZES if digits * DIGIT * size <= room and size <= self.row - 3)
                sizes[kind] = next(fit, 0)
        return sizes

    def label(self, action: Action) -> str:
        return f"{action.chunk}.{action.microbatch}" if self.dotted else str(action.microbatch)

    def fill(self, kind: str, chunk: int) -> str:
        shade = shade_of(kind, chunk, self.schedule.chunks)
        return f"url(#{self.hatch}-{shade[1:]}) {shade}" if kind == "W" else shade


def charts_of(title: str, panels: Sequence[Panel], own_scales: bool) -> list[Chart]:
    """One scale for all panels, or for each its own. One grain for all, as they share hatchings and legend."""
    longest = max(timeline.makespan for _, timeline in panels)
    scales = [
        (WIDTH - LEFT - RIGHT) / ((timeline.makespan if own_scales else longest) or 1.0) for _, timeline in panels
    ]
    seconds = [timeline.measured for _, timeline in panels]
    units = ["s" if (here if own_scales else any(seconds)) else "" for here in seconds]
    widths = (
        (end - start) * scale
        for (_, timeline), scale in zip(panels, scales, strict=True)
        for row in timeline.spans
        for _, start, end in row
    )
    grain = 1 if min((width for width in widths if width > 0), default=CRISP) >= CRISP else 10
    # Several pictures on one page must not use each other's hatchings: their names follow from all that is drawn.
    hatch = "w" + sha256(repr((title, panels, own_scales)).encode()).hexdigest()[:8]
    return [Chart(*panel, unit, scale, grain, hatch) for panel, unit, scale in zip(panels, units, scales, strict=True)]


def shade_of(kind: str, chunk: int, chunks: int) -> str:
    """Chunk 0 in full colour, 40 % white more a chunk; in smaller steps from five chunks on, so that the last differs from idle."""
    return tint(COLOUR[kind], 0.6 ** (chunk * min(1.0, 3 / max(1, chunks - 1))))
