"""A schedule as a picture: who does what when, and what everybody holds in memory meanwhile.

Time runs to the right, rank 0 is on top, a block is an action with the number of its micro-batch (chunk.micro-batch from three
chunks on). Blue is F, orange B, hatched green W; later chunks are lighter; what stays grey is the bubble. Beneath stand, per rank,
the activations in flight, each from its F to the last of its B and W. Simulated and measured timelines are drawn alike.

The layout is that of the figures in Narayanan et al. 2021 (arXiv 2104.04473, figures 3 and 4). All numbers in the SVG are whole, so
equal timelines give equal text.

See it run: ``python -m minimeg.schedule 1f1b --pp 4 --microbatches 8 --svg out.svg``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf, isclose

from minimeg.schedule.actions import KINDS, refuse
from minimeg.schedule.chart import COLOUR, DIGIT, LEFT, Chart, Panel, charts_of, shade_of
from minimeg.schedule.timeline import Timeline
from minimeg.svg import IDLE, INK, QUIET, WHITE, element, hatching, number, picture, round_steps, text

SEPARATOR = " · "
LONGEST_LINE = 118  # characters that fit across the picture in the widest of the common fonts


def gantt(timeline: Timeline, *, title: str | None = None, memory: bool = True) -> str:
    """A timeline as SVG text, 760 px wide. A measured one is in seconds.

    Args:
        title: above the picture; the schedule's name and sizes if None.
        memory: whether to draw the activations in flight beneath.
    """
    return _figure(_name(timeline) if title is None else title, [("", timeline)], memory, own_scales=False)


def gantt_stack(
    panels: Sequence[Panel], *, title: str = "Pipeline schedules", memory: bool = True, own_scales: bool = False
) -> str:
    """Several timelines beneath each other as SVG text, on one time axis; in seconds if one of them is measured.

    Args:
        panels: (title, timeline) of each.
        own_scales: let each fill the width, in its own unit: a simulation in slots beneath a run in seconds.

    Raises:
        ValueError: no panel.
    """
    refuse([] if panels else ["panels is empty; give at least one (title, timeline)"], "cannot draw")
    return _figure(title, panels, memory, own_scales)


def _figure(title: str, panels: Sequence[Panel], memory: bool, own_scales: bool) -> str:
    charts = charts_of(title, panels, own_scales)
    parts = [text(title, font_size=15, font_weight="bold", x=16, y=28), *_legend(charts)]
    level = max(max(chart.peaks) / chart.schedule.chunks for chart in charts) if memory else 0
    y = 62
    for chart in charts:
        drawn, y = _panel(chart, y, level)
        parts += drawn
    captions = list(dict.fromkeys(line for chart in charts for line in _caption(chart)))
    parts += [text(line, fill=QUIET, font_size=11, x=16, y=y + 6 + 16 * i) for i, line in enumerate(captions)]
    seen = "; ".join(f"{chart.title}: {SEPARATOR.join(_facts(chart))}".removeprefix(": ") for chart in charts)
    sentence = f"Gantt chart, time to the right, rank 0 on top: {seen}. {' '.join(captions)}"
    return picture(y + 16 * len(captions) + 4, title, sentence, *parts)


def _panel(chart: Chart, y: int, level: float) -> tuple[list[str], int]:
    """One chart from y on, with memory curves to the scale of ``level`` activations unless that is 0; -> elements, y beneath."""
    parts = []
    if chart.title:
        parts.append(text(chart.title, font_size=13, font_weight="bold", x=16, y=y + 18))
        y += 22
    *first, peak = facts = _facts(chart)
    too_long = len(SEPARATOR.join(facts)) > LONGEST_LINE
    for line in [first, [peak]] if too_long else [facts]:
        parts.append(text(SEPARATOR.join(line), x=16, y=y + 16))
        y += 18
    y += 10
    for rank in range(chart.schedule.stages):
        parts += [*_rank_name(chart, rank, y, chart.row - 2), *_blocks(chart, rank, y)]
        y += chart.row
    parts += _time_axis(chart, y)
    y += 26
    if level and not chart.schedule.forward_only:
        words = f"{'chunk ' * (chart.schedule.chunks > 1)}activations in flight, peak on the right"
        parts.append(text(words, fill=QUIET, font_size=11, x=LEFT, y=y + 9))
        y += 16
        for rank in range(chart.schedule.stages):
            parts += [*_rank_name(chart, rank, y, chart.strip), *_memory(chart, rank, y, level)]
            y += chart.strip + 4
    return parts, y + 10


def _place(x: int, y: int, grain: int = 1) -> str:
    return f"translate({x} {y})" if grain == 1 else f"translate({x} {y}) scale({1 / grain:g} 1)"


def _middle(height: int, size: int) -> int:
    """Baseline of digits of a font size in the middle of a height."""
    return (height + size * 7 // 10) // 2


def _rank_name(chart: Chart, rank: int, y: int, height: int) -> Iterator[str]:
    """Every fourth only where rows are lower than text."""
    if height >= 12 or rank % 4 == 0:
        size = 12 if height >= 14 else 10
        yield text(f"r{rank}", font_size=size, text_anchor="end", x=LEFT - 8, y=y + _middle(height, size))


def _blocks(chart: Chart, rank: int, y: int) -> Iterator[str]:
    """The idle row, the blocks of a rank by kind and chunk, and the numbers on them."""
    chunks, grain, height = chart.schedule.chunks, chart.grain, chart.row - 2
    blocks: dict[tuple[str, int], list[str]] = defaultdict(list)
    numbers: dict[tuple[str, int], list[str]] = defaultdict(list)
    for action, x, width in chart.places(chart.timeline.spans[rank]):
        kind, _, chunk = action
        label, size = chart.label(action), chart.font_sizes[kind]
        name = []
        if size and len(label) * DIGIT * size <= width / grain + 1:
            numbers[kind, chunk].append(text(label, x=round((x + width / 2) / grain)))
        elif width >= 2 * grain:
            name = [element("title", str(action))]  # shown by a pointer, which could hit nothing narrower
        blocks[kind, chunk].append(element("rect", *name, height=height, width=width, x=x))
    yield element(
        "g",
        element("rect", fill=IDLE, height=height, width=chart.width * grain),
        *(
            element("g", *rects, fill=chart.fill(*key), stroke=COLOUR[key[0]] if chart.outlined else None)
            for key, rects in sorted(blocks.items())
        ),
        shape_rendering="crispEdges" if grain == 1 else None,
        transform=_place(LEFT, y, grain),
    )
    for (kind, chunk), words in sorted(numbers.items()):
        size = chart.font_sizes[kind]
        halo = shade_of(kind, chunk, chunks) if kind == "W" else None  # on hatching a digit needs a ground of its own
        yield element(
            "g",
            *words,
            fill=WHITE if (kind, chunk) == ("F", 0) else INK,
            font_size=size,
            paint_order=halo and "stroke",
            stroke=halo,
            stroke_linejoin=halo and "round",
            stroke_width=halo and 4,
            text_anchor="middle",
            transform=_place(LEFT, y + _middle(height, size)),
        )


def _time_axis(chart: Chart, y: int) -> Iterator[str]:
    """Round times beneath the rows, and the makespan where it ends."""
    span, end = chart.timeline.makespan, LEFT + chart.width
    yield text("time", fill=QUIET, font_size=11, text_anchor="end", x=LEFT - 16, y=y + 17)
    steps = round_steps(span, 52 / chart.px_per_time) if span > 0 else []
    marks = [(LEFT + chart.px(chart.begin + float(step)), step) for step in steps]
    marks = [(x, step) for x, step in marks if x <= end - 40]
    yield element("path", d="".join(f"M{x} {y}v5" for x in [*(x for x, _ in marks), end]), stroke=QUIET)
    words = [text(step, x=x, y=y + 17) for x, step in marks]
    yield element("g", *words, fill=QUIET, font_size=11, text_anchor="middle")
    yield text(_with_unit(span, chart), font_size=11, font_weight="bold", text_anchor="middle", x=end, y=y + 17)


def _memory(chart: Chart, rank: int, y: int, level: float) -> Iterator[str]:
    """A step curve of what the rank holds, full height for the activations of ``level`` whole stages, and its peak as a number."""
    height, chunks, peak = chart.strip, chart.schedule.chunks, chart.peaks[rank]
    curve, before = f"M0 {height}", 0
    # In chunk activations, kept whole until the last of B and W. What is freed and taken at one moment is no change.
    steps = chart.timeline.memory(rank, activation=chunks, weight_part=chunks)
    for (time, held), (following, _) in pairwise([*steps, (inf, 0.0)]):
        if following - time > 1e-9 * chart.timeline.makespan and round(held) != before:
            before = round(held)
            curve += f"H{chart.px(time)}V{height - round(before / chunks * (height - 1) / level)}"
    yield element(
        "g",
        element("rect", fill=IDLE, height=height, width=chart.width),
        element("path", d=f"{curve}H{chart.width}V{height}", fill="#CCCCCC", stroke=INK),
        transform=_place(LEFT, y),
    )
    size = 11 if height >= 12 else 9
    yield text(str(peak), font_size=size, x=LEFT + chart.width + 8, y=y + _middle(height, size))


def _legend(charts: Sequence[Chart]) -> Iterator[str]:
    """What the colours mean, in one line, after the hatchings it and all blocks use."""
    most = max(charts, key=lambda chart: chart.schedule.chunks)
    kinds = {span.action.kind for chart in charts for row in chart.timeline.spans for span in row}
    if "W" in kinds:
        shades = {shade_of("W", c, chart.schedule.chunks) for chart in charts for c in range(chart.schedule.chunks)}
        yield element("defs", *(hatching(f"{most.hatch}-{shade[1:]}", shade, most.grain) for shade in sorted(shades)))
    split = all(chart.schedule.split for chart in charts)
    names = {"F": "F forward", "B": "B input gradient" if split else "B backward", "W": "W weight gradient"}
    chunks = range(most.schedule.chunks)
    keys = [(names[kind], [most.fill(kind, chunk) for chunk in chunks]) for kind in KINDS if kind in kinds]
    x, box = 16, max(3, min(12, 48 // len(chunks)))
    for words, fills in [*keys, ("idle", [IDLE])]:
        width = 12 if words == "idle" else box
        for fill in fills:
            swatch = element("rect", fill=fill, height=12, width=width * most.grain)
            yield element("g", swatch, transform=_place(x, 42, most.grain))
            x += width
        yield text(words, x=x + 6, y=52)
        x += 24 + round(6.8 * len(words))
    if len(chunks) > 1:
        yield text(f"dark: chunk 0, light: chunk {chunks[-1]}", fill=QUIET, x=x, y=52)


def _name(timeline: Timeline) -> str:
    s = timeline.schedule
    sizes = {"rank": s.stages, "micro-batch": s.microbatches, "chunk a rank": s.chunks}
    plural = {"rank": "ranks", "micro-batch": "micro-batches", "chunk a rank": "chunks a rank"}
    words = [f"{size} {word if size == 1 else plural[word]}" for word, size in sizes.items()]
    return f"{s.name}: {', '.join(words if s.chunks > 1 else words[:2])}"


def _with_unit(time: float, chart: Chart) -> str:
    return f"{number(time)} {chart.unit}" if chart.unit else number(time)


def _facts(chart: Chart) -> list[str]:
    """The Timeline's own numbers: both bubbles by name, and the peak."""
    timeline, n = chart.timeline, chart.schedule.chunks
    longest, peak = max(timeline.stage_spans), max(chart.peaks)
    own = "" if isclose(longest, timeline.makespan) else f" (longest rank {_with_unit(longest, chart)})"
    facts = [f"makespan {_with_unit(timeline.makespan, chart)}{own}"]
    ideal, total = (number(round(100 * part, 2)) for part in (timeline.bubble_of_ideal, timeline.bubble_of_total))
    facts.append(f"bubble {ideal} % of ideal, {total} % of total time")
    if not chart.schedule.forward_only:
        facts.append(f"peak {peak}{f' chunks ({number(peak / n)} stages)' if n > 1 else ''} in flight")
    return facts


def _caption(chart: Chart) -> Iterator[str]:
    """Under which assumptions the picture holds."""
    timeline = chart.timeline
    if timeline.measured:
        yield "Measured, in seconds: grey is whatever is not an action, so messages and waiting too."
    else:
        took: dict[str, list[float]] = defaultdict(list)
        for action, start, end in (span for row in timeline.spans for span in row):
            took[action.kind].append(end - start)
        equal = all(isclose(min(times), max(times), rel_tol=1e-6) for times in took.values())
        messages = f"a latency of {number(timeline.comm)} a message" if timeline.comm else "free communication"
        yield f"Simulated: holds for {messages} and {'equal' if equal else 'the given, unequal'} stages."
    if not isclose(max(timeline.stage_spans), timeline.makespan):
        yield "The bubble is that of the longest rank, from its own first start to its own last end."
