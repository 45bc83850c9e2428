"""The Gantt chart, read back from its SVG: blocks, numbers, memory curves and legend must say what the Timeline says."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from minimeg.schedule import Action, Schedule, Span, Timeline, build, interleaved, one_f_one_b, simulate, zero_bubble_h1
from minimeg.schedule.chart import LEFT, shade_of
from minimeg.schedule.drawing import gantt, gantt_stack
from minimeg.svg import element, number, picture, round_steps, text, tint

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = {"F": ("#0072B2", "#66AAD1"), "B": ("#E69F00", "#F0C566"), "W": ("#009E73", "#66C5AB")}
IDLE, INK, WHITE = "#F2F2F2", "#222222", "#FFFFFF"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "pipedream", "pipedream-2bw", "forward-only")
SIZES = ((2, 4), (4, 8), (8, 32), (16, 64))


def timeline_of(name, stages=4, microbatches=8, **sizes):
    schedule = build(name, stages, microbatches, **sizes)
    return simulate(schedule, 1, 1, 1) if schedule.split else simulate(schedule, 1, 2)


def measured(schedule, seed=0):
    """What a recorder might return: seconds since some boot, no two actions equally long."""
    draw = random.Random(seed)
    rows = []
    for row in simulate(schedule, 1, 1, 1, comm=0.1).spans:
        ends, shifted = 5.0, []
        for action, start, end in row:
            begins = max(ends, 5.0 + 0.01 * start + 0.0005 * draw.random())
            ends = begins + 0.01 * (end - start) * (0.9 + 0.3 * draw.random())
            shifted.append(Span(action, begins, ends))
        rows.append(tuple(shifted))
    return Timeline(schedule, tuple(rows), measured=True)


class Drawn:
    """An SVG read back. A row is a group of the idle rectangle and groups of blocks; a memory curve, one of it and a path."""

    def __init__(self, svg):
        self.root = ET.fromstring(svg)
        self.rows, self.curves = [], []
        for group in self.root.findall(f"{SVG}g"):
            first, *rest = [*group] or [group]
            if first.get("fill") == IDLE and rest and rest[0].tag == f"{SVG}path":
                self.curves.append(rest[0].get("d"))
            elif first.get("fill") == IDLE and rest:
                self.rows.append(Row(group, self.root))
        self.words = [e.text for e in self.root.iter(f"{SVG}text")]

    def with_start(self, start):
        return [words for words in self.words if words.startswith(start)]


class Row:
    def __init__(self, group, root):
        place = re.fullmatch(r"translate\((\d+) (\d+)\)(?: scale\(0\.1 1\))?", group.get("transform"))
        assert int(place[1]) == LEFT
        self.y, self.grain = int(place[2]), 10 if "scale" in group.get("transform") else 1
        idle, *blocks = group
        self.height, self.width = int(idle.get("height")), int(idle.get("width")) / self.grain
        self.blocks = sorted(
            (
                int(r.get("x")) / self.grain,
                int(r.get("width")) / self.grain,
                g.get("fill"),
                g.get("stroke"),
                r.findtext(f"{SVG}title"),
            )
            for g in blocks
            for r in g
        )
        self.numbers = {}  # centre: (text, colour, font size)
        for g in root.findall(f"{SVG}g[@font-size]"):
            place = re.fullmatch(r"translate\((\d+) (\d+)\)", g.get("transform") or "")
            if place and self.y < int(place[2]) <= self.y + self.height:
                self.numbers |= {int(t.get("x")): (t.text, g.get("fill"), int(g.get("font-size"))) for t in g}

    def number_in(self, x, width):
        return next((words for centre, words in self.numbers.items() if x <= centre <= x + width), None)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_one_block_an_action_in_its_colour_at_its_time(name, stages, microbatches):
    timeline = timeline_of(name, stages, microbatches)
    drawn = Drawn(gantt(timeline))
    assert len(drawn.rows) == stages
    assert [row.y for row in drawn.rows] == sorted(row.y for row in drawn.rows), "rank 0 is on top"
    px = (760 - LEFT - 44) / timeline.makespan
    for row, spans in zip(drawn.rows, timeline.spans, strict=True):
        assert len(row.blocks) == len(spans)
        assert row.width == pytest.approx(timeline.makespan * px, abs=0.5)
        for (x, width, fill, _, _), (action, start, end) in zip(row.blocks, spans, strict=True):
            assert x == pytest.approx(start * px, abs=0.5 / row.grain + 1e-6)
            assert (end - start) * px - 2.01 <= width < (end - start) * px + 0.5
            colour = COLOURS[action.kind][action.chunk]
            assert fill == colour if action.kind != "W" else re.fullmatch(rf"url\(#w[0-9a-f]{{8}}-\w+\) {colour}", fill)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_blocks_of_a_row_leave_a_gap_and_stay_inside(name, stages, microbatches):
    for timeline in (timeline_of(name, stages, microbatches), measured(build(name, stages, microbatches))):
        for row in Drawn(gantt(timeline)).rows:
            for (x, width, *_), (following, *_) in itertools.pairwise(row.blocks):
                assert width > 0
                assert x + width < following
            assert row.blocks[0][0] >= 0
            assert sum(row.blocks[-1][:2]) <= row.width


@pytest.mark.parametrize("name", NAMES)
def test_each_block_of_4x8_has_its_micro_batch_as_number(name):
    timeline = timeline_of(name)
    for row, spans in zip(Drawn(gantt(timeline)).rows, timeline.spans, strict=True):
        assert len(row.numbers) == len(spans)
        for (x, width, *_, hint), span in zip(row.blocks, spans, strict=True):
            words, colour, _ = row.number_in(x, width)
            assert words == str(span.action.microbatch)
            assert colour == (WHITE if (span.action.kind, span.action.chunk) == ("F", 0) else INK)
            assert hint is None


@pytest.mark.parametrize(
    "timeline", [timeline_of(n, *s) for n in NAMES for s in SIZES] + [measured(one_f_one_b(4, 16))]
)
def test_numbers_fit_and_blocks_without_one_say_their_name_under_the_pointer(timeline):
    for row, spans in zip(Drawn(gantt(timeline)).rows, timeline.spans, strict=True):
        for (x, width, *_, hint), span in zip(row.blocks, spans, strict=True):
            shown = row.number_in(x, width)
            if shown:
                assert len(shown[0]) * shown[2] * 0.56 <= width  # Liberation Sans, Roboto, Segoe UI
                assert shown[2] >= 8
            else:
                assert hint == (str(span.action) if width >= 2 else None)


@pytest.mark.parametrize("name", NAMES)
def test_equal_blocks_of_a_kind_are_numbered_all_or_none(name):
    timeline = timeline_of(name, 8, 32)
    shown = set()
    for row, spans in zip(Drawn(gantt(timeline)).rows, timeline.spans, strict=True):
        for (x, width, *_), span in zip(row.blocks, spans, strict=True):
            shown.add((span.action.kind, row.number_in(x, width) is not None))
    assert len(shown) == len({kind for kind, _ in shown})
    if name == "1f1b":
        assert shown == {("F", False), ("B", True)}


def test_a_short_block_among_long_ones_goes_without_number():
    schedule = one_f_one_b(1, 2)
    actions = schedule.ranks[0]
    spans = [Span(action, i, i + (0.025 if i == 2 else 1)) for i, action in enumerate(actions)]
    (row,) = Drawn(gantt(Timeline(schedule, (tuple(spans),)))).rows
    assert sorted(words for words, *_ in row.numbers.values()) == ["0", "0", "1"]
    assert [hint for *_, hint in row.blocks] == [None, None, "F0.1", None]


def test_times_that_overlap_by_rounding_give_blocks_that_do_not():
    schedule = one_f_one_b(1, 2)
    times = [(0, 1.004), (1, 2), (1.999, 3.3), (2.9, 4)]
    spans = tuple(Span(action, *time) for action, time in zip(schedule.ranks[0], times, strict=True))
    (row,) = Drawn(gantt(Timeline(schedule, (spans,)))).rows
    for (x, width, *_), (following, *_) in itertools.pairwise(row.blocks):
        assert x + width < following


def test_16x64_is_too_narrow_for_numbers():
    drawn = Drawn(gantt(timeline_of("1f1b", 16, 64)))
    assert not any(row.numbers for row in drawn.rows)
    assert [block[-1] for block in drawn.rows[15].blocks][:4] == ["F0.0", "B0.0", "F0.1", "B0.1"]


def test_from_three_chunks_on_numbers_name_the_chunk_and_blocks_are_outlined():
    timeline = simulate(interleaved(2, 2, 3), 1, 2)
    for row, spans in zip(Drawn(gantt(timeline)).rows, timeline.spans, strict=True):
        for (x, width, fill, outline, _), span in zip(row.blocks, spans, strict=True):
            assert row.number_in(x, width)[0] == f"{span.action.chunk}.{span.action.microbatch}"
            assert fill == shade_of(span.action.kind, span.action.chunk, 3)
            assert outline == COLOURS[span.action.kind][0]
    narrow = Drawn(gantt(simulate(interleaved(4, 8, 4), 1, 2)))
    assert {words for words, *_ in narrow.rows[0].numbers.values()} == set("01234567"), (
        "no room: the shade says the chunk"
    )


def test_shades_and_contrast():
    assert [shade_of(kind, chunk, 2) for kind in "FBW" for chunk in (0, 1)] == [
        c for kind in "FBW" for c in COLOURS[kind]
    ]
    for kind, chunks in itertools.product("FBW", range(1, 9)):
        shades = [shade_of(kind, chunk, chunks) for chunk in range(chunks)]
        assert len({*shades, IDLE, WHITE}) == chunks + 2
        assert chunks < 4 or shades[-1] == shade_of(kind, 3, 4), "no lighter, or it would look idle"
        lights = [luminance(shade) for shade in shades]
        assert lights == sorted(lights)
        for chunk, light in enumerate(lights):
            white = (kind, chunk) == ("F", 0)
            ratio = 1.05 / (light + 0.05) if white else (light + 0.05) / (luminance(INK) + 0.05)
            assert ratio >= 4.5 or ((kind, chunk) == ("F", 1) and chunks > 5 and ratio > 3.8)


def luminance(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_legend_has_the_timelines_numbers(name, stages, microbatches):
    timeline = timeline_of(name, stages, microbatches)
    drawn = Drawn(gantt(timeline))
    (facts,) = drawn.with_start("makespan")
    assert float(re.search(r"makespan (\S+)", facts)[1]) == timeline.makespan
    ideal, total = re.search(r"bubble (\S+) % of ideal, (\S+) % of total time", facts).groups()
    assert float(ideal) == pytest.approx(100 * timeline.bubble_of_ideal, abs=0.005)
    assert float(total) == pytest.approx(100 * timeline.bubble_of_total, abs=0.005)
    longest = re.search(r"longest rank ([\d.]+)", facts)
    assert (float(longest[1]) if longest else timeline.makespan) == max(timeline.stage_spans)
    peak = re.search(r"peak (\d+) ", facts)
    assert (int(peak[1]) if peak else 0) == max(timeline.peak_in_flight)
    assert facts in drawn.root.findtext(f"{SVG}desc")


def test_legend_words():
    assert Drawn(gantt(timeline_of("1f1b"))).with_start("B ") == ["B backward"]
    assert Drawn(gantt(timeline_of("zb-h1"))).with_start("B ") == ["B input gradient"]
    assert Drawn(gantt(timeline_of("zb-v"))).with_start("dark") == ["dark: chunk 0, light: chunk 1"]
    (facts,) = Drawn(gantt(timeline_of("interleaved"))).with_start("makespan")
    assert facts.endswith("peak 11 chunks (5.5 stages) in flight")
    (facts,) = Drawn(gantt(timeline_of("zb-h2"))).with_start("makespan")
    assert facts == "makespan 27 (longest rank 24) · bubble 0 % of ideal, 0 % of total time · peak 7 in flight"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "forward-only"])
def test_memory_curves_count_activations_from_f_to_the_last_of_b_and_w(name):
    timeline = timeline_of(name)
    drawn = Drawn(gantt(timeline))
    last = "W" if timeline.schedule.split else "B"
    px, highest = 668 / timeline.makespan, max(timeline.peak_in_flight)
    assert len(drawn.curves) == 4
    assert drawn.words[drawn.words.index(next(w for w in drawn.words if "in flight, peak on" in w)) :][2:9:2] == [
        str(peak) for peak in timeline.peak_in_flight
    ]
    for curve, spans in zip(drawn.curves, timeline.spans, strict=True):
        assert re.fullmatch(r"M0 20(H\d+V\d+)*", curve)
        steps = [(int(x), int(y)) for x, y in re.findall(r"H(\d+)V(\d+)", curve)]
        for time in (
            0.3 + 0.25 * i for i in range(int(4 * timeline.makespan) - 1)
        ):  # never at a change, which are at k/2
            time += 0.01
            begun = sum(action.kind == "F" and start <= time for action, start, _ in spans)
            gone = sum(action.kind == last and end <= time for action, _, end in spans)
            level = next((y for x, y in reversed(steps) if x <= round(time * px)), 20)
            assert level == 20 - round((begun - gone) * 19 / highest)


def test_memory_curves_have_no_notch_where_one_goes_as_another_comes():
    drawn = Drawn(gantt(simulate(one_f_one_b(4, 8), 0.1, 0.1 + 0.2)))
    assert [len(re.findall("V", curve)) - 1 for curve in drawn.curves] == [8, 6, 4, 2]


def test_memory_can_be_left_out_and_forward_only_has_none():
    assert not Drawn(gantt(timeline_of("1f1b"), memory=False)).curves
    assert not Drawn(gantt(timeline_of("forward-only"))).curves
    assert "in flight" not in gantt(timeline_of("forward-only"))


def test_memory_scale_is_one_for_schedules_with_different_chunks():
    drawn = Drawn(gantt_stack([(name, timeline_of(name)) for name in ("gpipe", "zb-v")]))
    lowest = [min(int(y) for y in re.findall(r"V(\d+)", curve)) for curve in drawn.curves]
    assert lowest == [1] * 4 + [10] * 4, "8 half stages are as high as 4 whole ones"


def test_stack_has_one_time_axis_or_each_its_own():
    panels = [(name, timeline_of(name)) for name in ("gpipe", "1f1b", "zb-h1")]
    drawn = Drawn(gantt_stack(panels))
    assert [row.width for row in drawn.rows[::4]] == [668, 668, round(668 * 27 / 33)]
    assert [row.width for row in Drawn(gantt_stack(panels, own_scales=True)).rows[::4]] == [668] * 3
    assert [drawn.words.index(name) for name, _ in panels] == sorted(drawn.words.index(name) for name, _ in panels)
    assert len(drawn.with_start("makespan")) == 3
    assert drawn.with_start("B ") == ["B backward"], "not split everywhere"
    with pytest.raises(ValueError, match="panels is empty"):
        gantt_stack([])


def test_measured_timelines_are_in_seconds():
    timeline = measured(zero_bubble_h1(4, 8))
    drawn = Drawn(gantt(timeline))
    (facts,) = drawn.with_start("makespan")
    assert facts.startswith(f"makespan {timeline.makespan:.4g} s · ")
    assert f"{timeline.makespan:.4g} s" in drawn.words
    assert {"0", "0.05", "0.10", "0.20"} <= set(drawn.words)
    assert drawn.with_start("Measured, in seconds")
    assert not drawn.with_start("Simulated")
    assert len({width for row in drawn.rows for _, width, *_ in row.blocks}) > 3, "unequal blocks"
    predicted = simulate(timeline.schedule, 0.01, 0.01, 0.01)
    shared = Drawn(gantt_stack([("measured", timeline), ("simulated", predicted)]))
    assert shared.rows[4].width == round(668 * predicted.makespan / timeline.makespan)
    assert all(" s · " in facts for facts in shared.with_start("makespan"))
    assert len(shared.with_start("Simulated")) == len(shared.with_start("Measured")) == 1
    slots = Drawn(
        gantt_stack([("measured", timeline), ("simulated", simulate(timeline.schedule, 1, 1, 1))], own_scales=True)
    )
    assert [" s · " in facts for facts in slots.with_start("makespan")] == [True, False]


def test_a_line_too_long_for_the_picture_is_two():
    timeline = measured(build("zb-v", 4, 8))
    words = Drawn(gantt(timeline)).words
    (facts,) = (line for line in words if line.startswith("makespan"))
    assert words[words.index(facts) + 1] == "peak 8 chunks (4 stages) in flight"
    assert max(map(len, words)) < 120
    assert f"{facts} · peak 8 chunks (4 stages) in flight. " in ET.fromstring(gantt(timeline)).findtext(f"{SVG}desc")


def test_caption_names_the_assumptions():
    schedule = one_f_one_b(2, 4)
    captions = {
        "free communication and equal stages": simulate(schedule),
        "a latency of 0.25 a message and equal stages": simulate(schedule, comm=0.25),
        "free communication and the given, unequal stages": simulate(schedule, forward=[1, 2]),
    }
    for caption, timeline in captions.items():
        assert f"Simulated: holds for {caption}." in Drawn(gantt(timeline)).words
        assert caption in ET.fromstring(gantt(timeline)).findtext(f"{SVG}desc")
    bound = "The bubble is that of the longest rank, from its own first start to its own last end."
    assert bound in Drawn(gantt(timeline_of("zb-h2"))).words
    assert bound not in Drawn(gantt(timeline_of("zb-h1"))).words


EVERYTHING = [gantt(timeline_of(n, *s)) for n in NAMES for s in ((4, 8), (16, 64))] + [
    gantt(measured(zero_bubble_h1(4, 8))),
    gantt(simulate(interleaved(4, 8, 4))),
    gantt_stack([(n, timeline_of(n)) for n in NAMES]),
]


@pytest.mark.parametrize("svg", EVERYTHING)
def test_form(svg):
    root = ET.fromstring(svg)
    assert [child.tag for child in root][:3] == [f"{SVG}title", f"{SVG}desc", f"{SVG}rect"]
    assert root.get("role") == "img"
    assert root.get("width") == "760"
    x, y, width, height = map(int, root.get("viewBox").split())
    ground = root[2]
    assert (x, y, width, height) == (0, 0, 760, int(ground.get("height")))
    assert (ground.get("fill"), ground.get("width")) == (WHITE, "760")
    for tag in re.findall(r"<[a-z][^>]*>", svg):
        names = re.findall(r' ([\w:-]+)="', tag)
        assert names == sorted(names)
    for e in root.iter():
        for name in ("x", "y", "width", "height", "font-size", "stroke-width"):
            assert re.fullmatch(r"\d+", e.get(name, "0")), ET.tostring(e)
        assert not re.search(r"\.", e.get("d", ""))
        if e.tag == f"{SVG}text" and e.get("y"):
            assert 0 < int(e.get("y")) < height
    assert "<style" not in svg
    assert " class=" not in svg
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) == set(ids)


def test_pictures_on_one_page_share_no_name():
    ids = [id for svg in EVERYTHING for id in re.findall(r' id="([^"]+)"', svg)]
    assert len(ids) > 5
    assert len(ids) == len(set(ids))


def test_equal_timelines_give_equal_text_in_every_process():
    program = (
        "import sys; from minimeg.schedule import build, simulate; from minimeg.schedule.drawing import gantt\n"
        "sys.stdout.write(gantt(simulate(build('zb-v', 4, 8), 1, 1, 1)))\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    texts = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-X", "utf8", "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
        texts.append(done.stdout.decode())
    assert texts == [gantt(timeline_of("zb-v"))] * 2


def test_size_stays_modest():
    assert len(gantt(timeline_of("1f1b"))) < 10_000
    assert len(gantt(timeline_of("1f1b", 16, 64))) < 160_000
    assert len(gantt(timeline_of("zb-v", 16, 64))) < 300_000


def test_titles():
    assert "1f1b: 4 ranks, 8 micro-batches" in Drawn(gantt(timeline_of("1f1b"))).words
    assert "interleaved: 2 ranks, 1 micro-batch, 3 chunks a rank" in Drawn(gantt(simulate(interleaved(2, 1, 3)))).words
    nasty = "a < b & \"c\" > 'd'"
    drawn = Drawn(gantt_stack([(nasty, timeline_of("1f1b"))], title=nasty))
    assert drawn.root.findtext(f"{SVG}title") == nasty
    assert drawn.words.count(nasty) == 2


def test_nothing_to_draw_and_no_duration_are_drawn_too():
    schedule = Schedule("empty", 2, 1, 1, ((), ()))
    assert Drawn(gantt(Timeline(schedule, ((), ())))).with_start("makespan 0")
    free = simulate(zero_bubble_h1(2, 3), 1, 2, weight=0)
    assert [len(row.blocks) for row in Drawn(gantt(free)).rows] == [9, 9]
    lazy = Timeline(schedule, ((Span(Action("F", 0), 1.0, 2.0),), ()))
    assert [len(row.blocks) for row in Drawn(gantt(lazy)).rows] == [1]


def test_64_ranks_have_every_fourth_name():
    names = re.findall(r">(r\d+)<", gantt(timeline_of("1f1b", 64, 8), memory=False))
    assert names == [f"r{rank}" for rank in range(0, 64, 4)]


def test_svg_helpers():
    assert element("rect", y=1, x=2, stroke_width=3, fill=None) == '<rect stroke-width="3" x="2" y="1"/>'
    assert text("<&", x=1) == '<text x="1">&lt;&amp;</text>'
    assert element("g", text("a"), title='"') == '<g title="&quot;"><text>a</text></g>'
    assert [child.text for child in ET.fromstring(picture(9, "a & b", "c"))][:2] == ["a & b", "c"]
    assert [tint("#0072B2", 0.6), tint("#E69F00", 0.6), tint("#009E73", 1)] == ["#66AAD1", "#F0C566", "#009E73"]
    assert [number(x) for x in (33.0, 26.25, 0.351701, 12345.6, 0.0, 9.375)] == [
        "33",
        "26.25",
        "0.3517",
        "12346",
        "0",
        "9.375",
    ]
    assert round_steps(33, 2.6) == ["0", "5", "10", "15", "20", "25", "30"]
    assert round_steps(0.31, 0.07) == ["0", "0.1", "0.2", "0.3"]
    assert round_steps(0.031, 0.008) == ["0", "0.01", "0.02", "0.03"]
    assert round_steps(2500, 1000) == ["0", "1000", "2000"]
    assert round_steps(3, 0.6) == ["0", "1", "2", "3"]
