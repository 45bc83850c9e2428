"""A schedule as a picture: who does what when, and what everybody holds in memory meanwhile.

Time runs to the right, rank 0 is on top, a block is an action with the number of its micro-batch (chunk.micro-batch from three
chunks on). Blue is F, orange B, hatched green W; later chunks are lighter; what stays grey is the bubble. Below, per rank, the
activations in flight, each from its F to the last of its B and W: a simulated or a measured timeline, one function draws both.

The layout is that of the figures in Narayanan et al. 2021 (arXiv 2104.04473, figures 3 and 4). SVG text of whole numbers: equal
timelines give equal text.

See it run: ``python -m minimeg.schedule 1f1b --pp 4 --microbatches 8 --svg out.svg``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import floor, log10
from statistics import median

from minimeg.schedule.actions import KINDS, Action, refuse
from minimeg.schedule.timeline import Span, Timeline
from minimeg.svg import BLUE, GREEN, IDLE, INK, ORANGE, QUIET, WHITE, WIDTH, element, picture, text, tint

COLOUR = {"F": BLUE, "B": ORANGE, "W": GREEN}
LEFT, RIGHT = 48, 44  # margins, in which the names of the ranks and their peaks stand
DIGIT = 0.64  # width of a digit, in font sizes: that of DejaVu Sans, the widest of the common fonts
FONT_SIZES = (11, 10, 9, 8)
CRISP = 6  # px: from here on the edges of blocks lie on whole pixels; narrower blocks would come out unequal, theirs lie on tenths

Panel = tuple[str, Timeline] | tuple[str, Timeline, str | None]


def gantt(timeline: Timeline, *, title: str | None = None, memory: bool = True, unit: str | None = None) -> str:
    """A timeline as SVG text, 760 px wide.

    Args:
        title: above the picture; the schedule's name and sizes if None.
        memory: whether to draw the activations in flight beneath.
        unit: of a *measured* timeline's times, such as "s"; None says that the times are simulated, in no unit.
    """
    return _figure(title or _name(timeline), [_Panel("", timeline, unit)], memory, own_scales=False)


def gantt_stack(
    panels: Sequence[Panel], *, title: str = "Pipeline schedules", memory: bool = True, own_scales: bool = False
) -> str:
    """Several timelines beneath each other as SVG text: on one time axis, if their units are the same.

    Args:
        panels: (title, timeline), or (title, timeline, unit) for a measured one; see ``gantt``.
        own_scales: let each fill the width. Timelines of different units always do, as no second is as long as a slot.

    Raises:
        ValueError: no panel.
    """
    refuse([] if panels else ["panels is empty; give at least one (title, timeline)"], "cannot draw")
    return _figure(title, [_Panel(*panel) for panel in panels], memory, own_scales)


@dataclass(frozen=True)
class _Panel:
    title: str
    timeline: Timeline
    unit: str | None = None

    @property
    def begin(self) -> float:
        return min((row[0].start for row in self.timeline.spans if row), default=0.0)

    @property
    def row(self) -> int:
        """Height of a rank's row, px: 64 ranks must fit, and 2 must not look lost."""
        return max(10, min(26, 352 // self.timeline.schedule.stages))

    @property
    def strip(self) -> int:
        """Height of a rank's memory curve, px."""
        return max(8, min(20, 256 // self.timeline.schedule.stages))


@dataclass(frozen=True)
class _Axis:
    """Where a time lies: whole numbers of 1/grain px, to the right of LEFT."""

    begin: float
    px_per_time: float
    grain: int

    def at(self, time: float) -> int:
        return round((time - self.begin) * self.px_per_time * self.grain)

    def px(self, time: float) -> int:
        return LEFT + round((time - self.begin) * self.px_per_time)

    def group(self, y: int, *inside: str, **attributes: object) -> str:
        """A group in which x counts in 1/grain px from LEFT, and y in px from y."""
        scale = "" if self.grain == 1 else f" scale({1 / self.grain:g} 1)"
        return element("g", *inside, transform=f"translate({LEFT} {y}){scale}", **attributes)


def _figure(title: str, panels: list[_Panel], memory: bool, own_scales: bool) -> str:
    hatch = "w" + sha256(repr((title, panels, memory, own_scales)).encode()).hexdigest()[:8]
    axes = _axes(panels, own_scales)
    legend, y = _legend(panels, hatch, axes[0].grain)
    parts = [text(title, font_size=15, font_weight="bold", x=16, y=28), *legend]
    level = max((peak for panel in panels for peak in panel.timeline.peak_in_flight), default=0)
    for panel, axis in zip(panels, axes, strict=True):
        if panel.title:
            parts.append(text(panel.title, font_size=13, font_weight="bold", x=16, y=y + 18))
            y += 22
        parts.append(text(_facts(panel), x=16, y=y + 16))
        y += 28
        parts += _ranks(panel, axis, y, hatch)
        y += panel.row * panel.timeline.schedule.stages
        parts += _ticks(panel, axis, y)
        y += 26
        if memory and not panel.timeline.schedule.forward_only:
            parts += _memory(panel, axis, y, level)
            y += 18 + (panel.strip + 4) * panel.timeline.schedule.stages
        y += 10
    captions = list(dict.fromkeys(_caption(panel) for panel in panels))
    parts += [text(line, fill=QUIET, font_size=11, x=16, y=y + 8 + 16 * i) for i, line in enumerate(captions)]
    seen = "; ".join(": ".join(filter(None, (panel.title, _facts(panel)))) for panel in panels)
    sentence = f"Gantt chart, time to the right, rank 0 on top: {seen}. {' '.join(captions)}"
    return picture(y + 16 * len(captions) + 6, title, sentence, *parts)


def _axes(panels: list[_Panel], own_scales: bool) -> list[_Axis]:
    """One scale for all panels of a unit, and one grain for all panels, as they share the hatching."""
    longest: dict[object, float] = {}
    keys = [i if own_scales else panel.unit for i, panel in enumerate(panels)]
    for key, panel in zip(keys, panels, strict=True):
        longest[key] = max(longest.get(key, 0.0), panel.timeline.makespan)
    scales = [(WIDTH - LEFT - RIGHT) / (longest[key] or 1.0) for key in keys]
    widths = (
        (span.end - span.start) * scale
        for panel, scale in zip(panels, scales, strict=True)
        for row in panel.timeline.spans
        for span in row
    )
    grain = 1 if min((width for width in widths if width > 0), default=CRISP) >= CRISP else 10
    return [_Axis(panel.begin, scale, grain) for panel, scale in zip(panels, scales, strict=True)]


def _shade(kind: str, chunk: int, chunks: int) -> str:
    """Chunk 0 in full colour, 40 % white more a chunk, in smaller steps from five chunks on: the last must differ from idle."""
    return tint(COLOUR[kind], 0.6 ** (chunk * min(1.0, 3 / max(1, chunks - 1))))


def _fill(kind: str, chunk: int, chunks: int, hatch: str) -> str:
    shade = _shade(kind, chunk, chunks)
    return f"url(#{hatch}-{chunks}-{chunk}) {shade}" if kind == "W" else shade


def _label(action: Action, chunks: int) -> str:
    """With two chunks the shade says which."""
    return f"{action.chunk}.{action.microbatch}" if chunks > 2 else str(action.microbatch)


def _font_sizes(panel: _Panel, axis: _Axis) -> dict[str, int]:
    """Per kind the font size at which the longest label fits into the typical block; kinds without one go unlabelled."""
    sizes = {}
    for kind in KINDS:
        spans = [span for row in panel.timeline.spans for span in row if span.action.kind == kind]
        if spans:
            width = median(span.end - span.start for span in spans) * axis.px_per_time
            longest = max(len(_label(span.action, panel.timeline.schedule.chunks)) for span in spans)
            fit = (size for size in FONT_SIZES if longest * DIGIT * size + 2 <= width and size <= panel.row - 4)
            sizes[kind] = next(fit, 0)
    return sizes


def _ranks(panel: _Panel, axis: _Axis, top: int, hatch: str) -> Iterator[str]:
    """Per rank: its name, the idle row, the blocks by kind and chunk, then the numbers on them."""
    schedule, height = panel.timeline.schedule, panel.row - 2
    sizes = _font_sizes(panel, axis)
    right = axis.at(axis.begin + panel.timeline.makespan)
    for rank, row in enumerate(panel.timeline.spans):
        y = top + rank * panel.row
        yield from _rank_name(panel, rank, y, panel.row)
        blocks: dict[tuple[str, int], list[str]] = {}
        labels: dict[tuple[str, int], list[str]] = {}
        for span, x, width in _places(row, axis):
            kind, _, chunk = action = span.action
            label, size = _label(action, schedule.chunks), sizes[kind]
            fits = size and len(label) * DIGIT * size <= width / axis.grain
            gap = min(axis.grain, width // 5)  # keeps neighbours apart
            name = [] if fits else [element("title", str(action))]  # shown under the pointer
            blocks.setdefault((kind, chunk), []).append(element("rect", *name, height=height, width=width - gap, x=x))
            if fits:
                colour = WHITE if kind == "F" and chunk == 0 else INK
                labels.setdefault((colour, size), []).append(text(label, x=round((x + (width - gap) / 2) / axis.grain)))
        idle = element("rect", fill=IDLE, height=height, width=right)
        outlined = schedule.chunks > 2 and axis.grain == 1
        groups = [
            element(
                "g",
                *rects,
                fill=_fill(kind, chunk, schedule.chunks, hatch),
                stroke=COLOUR[kind] if outlined else None,
            )
            for (kind, chunk), rects in sorted(blocks.items())
        ]
        yield axis.group(y, idle, *groups, shape_rendering="crispEdges" if axis.grain == 1 else None)
        for (colour, size), words in sorted(labels.items()):
            place = f"translate({LEFT} {y + (height + size * 7 // 10) // 2})"
            yield element("g", *words, fill=colour, font_size=size, text_anchor="middle", transform=place)


def _places(row: Sequence[Span], axis: _Axis) -> Iterator[tuple[Span, int, int]]:
    """Each span with its left edge and width. Two clock readings may round past each other: a block begins where the last one ends."""
    edge = 0
    for span in row:
        x = max(edge, axis.at(span.start))
        edge = max(x, axis.at(span.end))
        yield span, x, edge - x


def _rank_name(panel: _Panel, rank: int, y: int, height: int) -> Iterator[str]:
    size = 12 if panel.row >= 16 else 10
    if rank % (1 if panel.row >= 14 else 4) == 0:
        yield text(f"r{rank}", font_size=size, text_anchor="end", x=LEFT - 8, y=y + (height + size * 7 // 10) // 2 - 1)


def _ticks(panel: _Panel, axis: _Axis, y: int) -> Iterator[str]:
    """Round times under the rows, and the makespan where it ends."""
    span = panel.timeline.makespan
    end = axis.px(axis.begin + span)
    yield text(f"time, {panel.unit}" if panel.unit else "time", fill=QUIET, font_size=11, text_anchor="end", x=LEFT - 8, y=y + 17)
    if span <= 0:
        return
    least = 48 / axis.px_per_time
    power = floor(log10(least))
    step, decimals = next(
        (digit * 10.0**e, max(0, -e)) for e in (power, power + 1) for digit in (1, 2, 5) if digit * 10.0**e >= least
    )
    if step < 1 and panel.unit is None and span >= 4:
        step, decimals = 1.0, 0
    times = [i * step for i in range(int(span / step) + 1)]
    marks = [(axis.px(axis.begin + time), f"{time:.{decimals}f}") for time in times]
    marks = [(x, label) for x, label in marks if x <= end - 30] + [(end, _number(span))]
    yield element("path", d="".join(f"M{x} {y}v5" for x, _ in marks), stroke=QUIET)
    words = [text(label, x=x, y=y + 17) for x, label in marks[:-1]]
    words.append(text(marks[-1][1], fill=INK, font_weight="bold", x=end, y=y + 17))
    yield element("g", *words, fill=QUIET, font_size=11, text_anchor="middle")


def _memory(panel: _Panel, axis: _Axis, top: int, level: int) -> Iterator[str]:
    """Per rank a step curve of activations in flight, all to one scale, and its peak as a number."""
    schedule, height = panel.timeline.schedule, panel.strip
    what = "chunk activations in flight" if schedule.chunks > 1 else "activations in flight"
    yield text(f"{what}, peak at the right", fill=QUIET, font_size=11, x=LEFT, y=top + 8)
    right = axis.at(axis.begin + panel.timeline.makespan)
    for rank, peak in enumerate(panel.timeline.peak_in_flight):
        y = top + 18 + rank * (height + 4)
        path, before = [f"M0 {height}"], 0
        # One whole activation a chunk, all of it held until the last of B and W.
        for time, held in _last_of_each_time(panel.timeline.memory(rank, schedule.chunks, schedule.chunks)):
            if round(held) != before:
                before = round(held)
                path.append(f"H{axis.at(time)}V{height - round(before * (height - 1) / max(1, level))}")
        curve = "".join(path) + f"H{right}V{height}"
        yield from _rank_name(panel, rank, y, height)
        yield axis.group(
            y,
            element("rect", fill=IDLE, height=height, width=right),
            element("path", d=curve, fill=INK, fill_opacity=0.2, stroke=INK, vector_effect="non-scaling-stroke"),
        )
        size = 11 if height >= 12 else 8
        x = LEFT + right // axis.grain + 6
        yield text(str(peak), font_size=size, x=x, y=y + (height + size * 7 // 10) // 2)


def _last_of_each_time(steps: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Freed and taken at one moment is no change."""
    for (time, held), (following, _) in pairwise([*steps, (float("inf"), 0.0)]):
        if time != following:
            yield time, held


def _legend(panels: list[_Panel], hatch: str, grain: int) -> tuple[list[str], int]:
    """What the colours mean, in one line; -> elements, y below."""
    schedules = [panel.timeline.schedule for panel in panels]
    kinds = {span.action.kind for panel in panels for row in panel.timeline.spans for span in row}
    chunks = max(schedule.chunks for schedule in schedules)
    split = any(schedule.split for schedule in schedules)
    names = {"F": "F forward", "B": "B backward", "W": "W weight gradient"}
    if split and all(schedule.split for schedule in schedules if not schedule.forward_only):
        names["B"] = "B input gradient"
    parts, x = _hatching(schedules, hatch, grain), 16
    shown = min(chunks, 4)
    for kind in [kind for kind in KINDS if kind in kinds] + ["idle"]:
        count = 1 if kind == "idle" else shown
        for i in range(count):
            chunk = i * (chunks - 1) // max(1, shown - 1)
            fill = IDLE if kind == "idle" else _fill(kind, chunk, chunks, hatch)
            place = f"translate({x + 12 * i} 42)" + ("" if grain == 1 else f" scale({1 / grain:g} 1)")
            stroke = "#CCCCCC" if kind == "idle" else None
            box = element("rect", fill=fill, height=12, stroke=stroke, vector_effect=stroke and "non-scaling-stroke", width=12 * grain)
            parts.append(element("g", box, transform=place))
        words = names.get(kind, "idle")
        parts.append(text(words, x=x + 12 * count + 6, y=52))
        x += 12 * count + 6 + 7 * len(words) + 14
    if chunks > 1:
        parts.append(text(f"chunk 0 dark, chunk {chunks - 1} light", fill=QUIET, x=x, y=52))
    return parts, 62
