"""Pictures and pages: well-formed SVG, the numbers that they claim, and widgets that draw the same page again."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from minimeg.lab import pages, widgets
from minimeg.lab.drawings.agreement import agreement
from minimeg.lab.drawings.bars import bars
from minimeg.lab.drawings.chart import line_chart
from minimeg.lab.drawings.cross_entropy import cross_entropy
from minimeg.lab.drawings.flags import flags
from minimeg.lab.drawings.interleaving import loop, sweep
from minimeg.lab.drawings.mappings import f_and_g
from minimeg.lab.drawings.ribbon import ribbon
from minimeg.lab.drawings.sharding import columns_then_rows, rows_first
from minimeg.lab.drawings.versions import most_alive, version_strips
from minimeg.lab.drawings.waiting import ring_of_two
from minimeg.lab.pages import memory_page, rank_page, schedule_page, sharding_page
from minimeg.schedule import NAMES, one_f_one_b, pipedream, simulate

SVG = "{http://www.w3.org/2000/svg}"


def version_of(row, at):
    """Of PipeDream: a forward takes the newest, its backward the same."""
    forward = next(i for i, action in enumerate(row) if (action.kind, action.microbatch) == ("F", row[at].microbatch))
    return sum(action.kind == "B" for action in row[:forward])


def last_backward(row, at):
    return at == len(row) - 1


LINE = simulate(pipedream(4, 8))
VERSIONS = {(0, r, a): version_of(row, at) for r, row in enumerate(LINE.schedule.ranks) for at, a in enumerate(row)}
PIPEDREAM = ("PipeDream", [LINE], VERSIONS)

PICTURES = {
    "f and g": f_and_g(),
    "chart": line_chart({"a": [4.0, 3, 2.5], "b": [4.0, 3, 2.5]}, title="t", sentence="Two curves lie on each other."),
    "agreement": agreement([4.0, 3, 2.5], {"a": [4.0, 3, 2.5 + 1e-13], "b": [4.0, 3, 9.0]}, title="t"),
    "cross entropy": cross_entropy(),
    "other logits": cross_entropy([0.5, 2.0, 1.0, 0.2], target=1),
    "ribbon": ribbon(2),
    "versions": version_strips([PIPEDREAM]),
    "flags": flags(simulate(one_f_one_b(2, 2)), {"every": lambda row, at: True, "last": last_backward}, right="last"),
    "deadlock": ring_of_two(["send F1", "send B0"], ["until it receives", "until it receives"]),
    **{f"loop {n}": loop(4, n) for n in (1, 2, 3, 4)},
    "sweep": sweep({"free": [None, 156, 57], "latency 1/4": [None, 176, 64.5]}, ["e=-1", "k=0", "k=1"], "slots"),
    "bars": bars({"a": 1, "b": 0}, title="t", sentence="One bar is long and one is not there."),
    **{f"columns {t}": columns_then_rows(t) for t in (1, 2, 4)},
    "rows": rows_first(),
    "ranks": rank_page().svg,
    "memory": memory_page().svg,
    **{name: schedule_page(name).svg for name in NAMES},
}


def words(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("svg", PICTURES.values(), ids=PICTURES)
def test_pictures_are_well_formed_described_and_inside_their_frame(svg):
    root = ElementTree.fromstring(svg)
    assert root.find(f"{SVG}title") is not None
    description = root.find(f"{SVG}desc")
    assert description is not None
    assert len(description.text or "") > 20
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for node in root.iter():
        for attribute, limit in (
            ("x", width),
            ("x1", width),
            ("x2", width),
            ("y", height),
            ("y1", height),
            ("y2", height),
        ):
            assert 0 <= float(node.attrib.get(attribute, 0)) <= limit, ElementTree.tostring(node)


def test_version_strips_show_each_version_and_count_those_in_use():
    assert most_alive(VERSIONS) == 4
    assert most_alive({key: version for key, version in VERSIONS.items() if key[1] == 2}) == 2
    assert most_alive(dict.fromkeys(VERSIONS, 7)) == 1
    numbers = [int(word) for word in words(version_strips([PIPEDREAM])) if word.isdigit()]
    assert sorted(numbers) == sorted(VERSIONS.values())


def test_flags_stand_behind_backwards_only_and_the_wrong_ones_are_dashed():
    root = ElementTree.fromstring(PICTURES["flags"])
    poles = [line.attrib.get("stroke-dasharray") for line in root.iter(f"{SVG}line")]
    assert poles.count(None) == 4  # the last backward of two stages, under both rules
    assert len(poles) == 6  # "every" puts two more, behind the first backwards


def test_f_and_g_shows_the_numbers_of_the_specimen():
    shown = words(f_and_g())
    assert "y = 10" in shown
    assert "dy/dx = 10" in shown
    numbers = [word for word in shown if word in "1234"]
    assert "".join(numbers) == "1111" + "1" + "1234" + "1234" + "1111" + "1"  # f, g; then backward: f, g


def test_agreement_shows_differences_by_powers_of_ten_and_what_is_equal_on_a_line_of_its_own():
    others = {"equal": [4.0, 3, 2], "off": [4.0, 3 + 2.0**-45, 2]}  # 2.8e-14: once, between two lines
    svg = agreement([4.0, 3, 2], others, title="t")
    lines = {
        text: float(node.attrib["y"]) - 4
        for node in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if (text := "".join(node.itertext())).startswith("1e-")
    }
    legend = 1
    circles = [float(node.attrib["cy"]) for node in ElementTree.fromstring(svg).iter(f"{SVG}circle")][legend:]
    (low,) = set(circles)
    assert low > lines["1e-16"]
    squares = [node.attrib["d"].split("m")[0] for node in ElementTree.fromstring(svg).iter(f"{SVG}path")][legend:]
    (high,) = {float(square.split()[1]) for square in squares} - {low}
    assert lines["1e-13"] < high < lines["1e-14"]
    assert "at most 1e-13" in svg
    with pytest.raises(ValueError, match=r"up to 5 curves of 2 values like the first, got \{'long': 3\}"):
        agreement([1.0, 2.0], {"long": [1.0, 2, 3]}, title="t")


def test_the_loop_puts_virtual_stage_c_times_p_plus_r_on_rank_r():
    shown = words(loop(3, 2))
    assert [word for word in shown if word.startswith("chunk")] == [
        f"chunk {chunk}: stage {3 * chunk + rank}" for chunk in (0, 1) for rank in range(3)
    ]


def test_the_sweep_frames_the_fastest_of_each_row_and_says_stuck_in_words():
    table = {"free": [None, 156, 57, 57], "one exchange": [None, None, 79, 57]}
    svg = sweep(table, ["e=-1", "k=0", "k=1", "k=2"], "slots")
    assert words(svg)[5:] == ["free", "stuck", "156", "57", "57", "one exchange", "stuck", "stuck", "79", "57"]
    assert svg.count('font-weight="bold"') == 1 + 3


def test_the_stepper_multiplies_rightly():
    for t in (1, 2, 4):
        shown = words(columns_then_rows(t))
        assert shown[-4:] == ["5", "3", "9", "11"]  # Z
    right = words(rows_first())
    assert right[-8:] == ["1", "1", "0", "2", "3", "1", "2", "4"]
    assert any("not relu(X A)" in word for word in right)
    assert any("equal to relu(X A)" in word for word in words(rows_first(1)))
    steps = [len(words(columns_then_rows(2, frames))) for frames in (1, 2, 3, 4)]
    assert all(a < b for a, b in pairwise(steps))


def test_cross_entropy_shows_its_reductions():
    shown = words(cross_entropy())
    assert {"MAX = 1.386", "SUM of exp = 10", "target's logit = 1.386", "= 0.9163", "-0.6"} <= set(shown)


def test_rank_page():
    page = rank_page(ranks=16, tp=2, pp=4, order="tp-cp-dp-pp", node=8, rank=5)
    assert page.lines == (
        "tp  rank 5 with [4], inside one node",
        "dp  rank 5 with [7], inside one node",
        "pp  rank 5 with [1, 9, 13], across 2 nodes",
    )
    assert "rank 3 with" in rank_page(ranks=4, tp=2, pp=1, rank=60).lines[0]  # the slider may stand too far
    with pytest.raises(ValueError, match="not a multiple"):
        rank_page(ranks=4, tp=8)


def test_schedule_page_counts_what_the_formula_says():
    page = schedule_page("1f1b", p=4, m=8)
    assert page.lines == (
        "makespan 33 slots",
        "bubble   0.3750 of ideal   0.2727 of total   (counted)",
        "         0.3750            0.2727            (formula: equal)",
        "in flight at the peak, by rank: 4 3 2 1",
    )
    assert "in flight at the peak, by rank: 8 8 8 8" in schedule_page("gpipe").lines
    assert "chunks" in schedule_page("interleaved", n=2).lines[-1]
    assert "NOT equal" in schedule_page("1f1b", latency=0.5).lines[2]
    split = schedule_page("zb-h1", backward=2)  # W takes half of B where nothing is said
    assert split.lines[0] == "makespan 27 slots"
    assert split == schedule_page("zb-h1", backward=1, weight=1)


def test_sharding_and_memory_pages():
    assert sharding_page(t=1).lines == ("all-reduces, forward: 0",)
    with pytest.raises(ValueError, match="t = 1 or 2"):
        sharding_page("rows", t=4)
    assert memory_page().lines[0].startswith("10 + 24/t + 5as/(ht) = 54 sbh = 442,368 bytes")
    assert memory_page(t=4, sequence_parallel=True).lines[0].startswith("34/t + 5as/(ht) = 13.5 sbh")
    assert memory_page(recompute="selective").lines[0].startswith("10 + 24/t = 34 sbh")
    assert memory_page(recompute="full").lines[0].startswith("2 = 2 sbh")


@pytest.mark.parametrize(
    ("make", "page", "control", "value"),
    [
        (widgets.rank_explorer, pages.rank_page, "order", "pp-dp-cp-tp"),
        (widgets.schedule_explorer, pages.schedule_page, "m", 12),
        (widgets.sharding_stepper, pages.sharding_page, "t", 4),
        (widgets.memory_calculator, pages.memory_page, "t", 4),
    ],
)
def test_a_widget_draws_its_page_again_when_a_control_moves(make, page, control, value):
    explorer = make()
    settings = {name: widget.value for name, widget in explorer.controls.items()}
    before = explorer.shown.value
    assert page(**settings).svg in before
    explorer.controls[control].value = value
    assert explorer.shown.value != before
    assert page(**{**settings, control: value}).svg in explorer.shown.value
    assert set(explorer._repr_mimebundle_()) == {"text/plain", widgets.VIEW}


def test_a_setting_that_is_forbidden_is_explained_and_the_next_one_works():
    explorer = widgets.rank_explorer()
    explorer.controls["ranks"].value = 4
    assert "world_size=4 is not a multiple of tp=2 * pp=4 = 8" in explorer.shown.value
    assert "<svg" not in explorer.shown.value
    explorer.controls["pp"].value = 2
    assert "<svg" in explorer.shown.value


def test_schedules_of_two_chunks_in_the_explorer():
    for name in ("zb-v", "interleaved", "forward-only", "pipedream"):
        assert "<svg" in widgets.schedule_explorer(name).shown.value
