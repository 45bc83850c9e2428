"""The heat map, read back from its SVG: what each cell says, colours that differ in grey, words that fit."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from minimeg.cost import GPTShape, Job, gpu, heat_map, plan
from minimeg.cost.heatmap import CELL_HEIGHT, LEFT, STEPS, TOP, _Shades, cells
from minimeg.svg import IDLE, INK, WHITE

SVG = "{http://www.w3.org/2000/svg}"
A100 = gpu("a100-80g")
JOB = Job(GPTShape(24, 2048, 16, sequence=1024, vocabulary=8000), 64, replace(A100, memory=7e9), 128)
PLAN = plan(JOB)
PICTURE = heat_map(PLAN)
ROOT = ET.fromstring(PICTURE)


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def boxes():
    """(x, y): (width, fill, the words inside) of each cell."""
    texts = [(int(e.get("x")), int(e.get("y")), e.text, e.get("fill")) for e in ROOT.iter(f"{SVG}text")]
    found = {}
    for rect in ROOT.iter(f"{SVG}rect"):
        if rect.get("height") == str(CELL_HEIGHT - 2) and rect.get("fill") != "none":
            x, y, width = (int(rect.get(name)) for name in ("x", "y", "width"))
            inside = [(words, ink) for tx, ty, words, ink in texts if x < tx < x + width and y < ty < y + CELL_HEIGHT]
            found[x, y] = (width, rect.get("fill"), inside)
    return found


def test_every_cell_says_what_is_true():
    drawn, found = cells(PLAN), boxes()
    columns, rows = sorted({c.tensor for c in drawn}), sorted({c.pipeline for c in drawn})
    width = next(iter(found.values()))[0] + 2
    assert len(found) == len(drawn)
    assert any(c.best is None for c in drawn)
    assert any(c.best for c in drawn)
    for cell in drawn:
        _, fill, inside = found[
            LEFT + columns.index(cell.tensor) * width, TOP + rows.index(cell.pipeline) * CELL_HEIGHT
        ]
        words = [word for word, _ in inside]
        fitting = [
            pair for pair in PLAN.candidates if (pair[1].tensor, pair[1].pipeline) == (cell.tensor, cell.pipeline)
        ]
        if not fitting:
            assert fill == IDLE
            assert words == ["does not fit", f"{cell.least / 1e9:.0f} GB"]
            assert cell.least > JOB.gpu.memory
        else:
            layout = cell.best.layout
            assert layout in [one for _, one in fitting]
            memory = f"{layout.recompute} {cell.best.memory_bytes / 1e9:.0f} GB"
            assert words == [f"{cell.best.mfu:.0%}", f"d{layout.data} n{layout.chunks} b{layout.microbatch}", memory]


def test_the_frame_is_around_the_best():
    (frame,) = [
        r for r in ROOT.iter(f"{SVG}rect") if r.get("fill") == "none" and r.get("height") == str(CELL_HEIGHT - 2)
    ]
    _, _, inside = boxes()[int(frame.get("x")), int(frame.get("y"))]
    first = PLAN.best[0]
    assert [word for word, _ in inside][:2] == [
        f"{first.mfu:.0%}",
        f"d{first.layout.data} n{first.layout.chunks} b{first.layout.microbatch}",
    ]


def test_it_is_read_out():
    title, desc = ROOT.find(f"{SVG}title").text, ROOT.find(f"{SVG}desc").text
    assert "64 x a100-80g" in title
    assert str(PLAN.best[0].layout) in desc
    assert desc in [e.text for e in ROOT.iter(f"{SVG}text")]
    assert ROOT.get("role") == "img"


def test_all_numbers_are_whole_and_equal_plans_give_equal_pictures():
    for e in ROOT.iter():
        for name in ("x", "y", "width", "height", "font-size"):
            assert re.fullmatch(r"\d+", e.get(name, "0")), (e.tag, name)
    assert heat_map(plan(JOB)) == PICTURE


def test_words_are_readable_on_every_shade():
    shades = _Shades([0.2, 0.6])
    fills = [shades.fill(step) for step in range(STEPS)]
    for step, fill in enumerate(fills):
        assert contrast(fill, shades.ink(step)) >= 4.5, step
    assert [luminance(fill) for fill in fills] == sorted((luminance(fill) for fill in fills), reverse=True)
    assert {shades.ink(step) for step in range(STEPS)} == {INK, WHITE}
    assert len(set(fills)) == STEPS


def test_shades_follow_utilisation():
    shades = _Shades([0.2, 0.6])
    assert [shades.step(value) for value in (0.2, 0.39, 0.41, 0.6)] == [0, 3, 4, STEPS - 1]
    assert _Shades([0.5]).step(0.5) == STEPS - 1
    found = {fill for _, fill, _ in boxes().values() if fill != IDLE}
    assert {shades.fill(0), shades.fill(STEPS - 1)} <= found


def test_words_fit_their_cells():
    """At 0.6 of the font's size a character, with a little room; the widest common fonts need that."""
    for width, _, inside in boxes().values():
        for word, _ in inside:
            assert len(word) * 0.6 * 10 <= width + 4, word


def test_the_picture_is_760_wide_and_nothing_lies_outside():
    _, _, width, height = map(int, ROOT.get("viewBox").split())
    assert width == 760
    for rect in ROOT.iter(f"{SVG}rect"):
        assert int(rect.get("x", 0)) + int(rect.get("width")) <= width
        assert int(rect.get("y", 0)) + int(rect.get("height")) <= height


def test_nothing_fits_and_nothing_is_legal():
    tight = heat_map(plan(replace(JOB, gpu=replace(A100, memory=4.01e9))))
    assert "fits the memory" in ET.fromstring(tight).find(f"{SVG}desc").text
    with pytest.raises(ValueError, match="no layout is legal"):
        heat_map(plan(replace(JOB, gpus=7)))
