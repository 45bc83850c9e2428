"""f and g, drawn as what they are: a copy and a sum, each the other turned upside down. See ``notebooks/02_f_and_g.ipynb``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minimeg.svg import BLUE, INK, ORANGE, QUIET, WHITE, element, number, picture, text

STEP, BOX_WIDTH, BOX_HEIGHT = 76, 56, 32
PANEL_TOP, ROW = 62, 150  # first row of panels; distance between the rows
LEFT, RIGHT = 130, 470  # centre of the first box of the left and of the right panels


def f_and_g(weights: Sequence[float] = (1, 2, 3, 4), x: float = 1) -> str:
    """y = g(w f(x)) with one weight a rank: what f and g do forward (above) and backward (below), with the numbers."""
    total = sum(weights)
    ones, parts = [1.0] * len(weights), list(weights)
    height = PANEL_TOP + 2 * ROW - 22
    parts_of_picture = [
        _heading("f: copy, then sum", LEFT, len(weights)),
        _heading("g: sum, then copy", RIGHT, len(weights)),
        *_row_names(),
        *_panel(LEFT, 0, [x] * len(weights), x, joined_above=True, towards_boxes=True, colour=BLUE, name="x"),
        *_panel(RIGHT, 0, [w * x for w in parts], total * x, joined_above=False, towards_boxes=False, colour=BLUE, name="y"),
        *_panel(LEFT, 1, parts, total, joined_above=True, towards_boxes=False, colour=ORANGE, name="dy/dx"),
        *_panel(RIGHT, 1, ones, 1, joined_above=False, towards_boxes=True, colour=ORANGE, name="dy/dy"),
    ]  # fmt: skip
    sentence = (
        "Where a value fans out in one direction, its gradients join in the other: f copies forward and sums backward, g sums "
        "forward and copies backward. Turn one picture upside down and it is the other."
    )
    return picture(height, "f and g, forward and backward", sentence, *parts_of_picture)


def _heading(words: str, first: int, boxes: int) -> str:
    middle = first + (boxes - 1) * STEP // 2
    return text(words, font_size=14, font_weight="bold", text_anchor="middle", x=middle, y=26)


def _row_names() -> Iterator[str]:
    for row, (words, colour) in enumerate((("forward", BLUE), ("backward", ORANGE))):
        y = PANEL_TOP + row * ROW + 60
        yield element("rect", fill=colour, height=14, rx=3, width=14, x=18, y=y - 11)
        yield text(words, x=38, y=y)


def _panel(
    first: int,
    row: int,
    values: list[float],
    whole: float,
    *,
    joined_above: bool,
    towards_boxes: bool,
    colour: str,
    name: str,
) -> Iterator[str]:
    """The ranks' boxes in a row, and the one value that fans out to them, or into which theirs join."""
    top = PANEL_TOP + row * ROW
    boxes_y = top + 74 if joined_above else top
    dot_y = top + 12 if joined_above else top + 94
    middle = first + (len(values) - 1) * STEP // 2
    edge = boxes_y if joined_above else boxes_y + BOX_HEIGHT
    down = 1 if joined_above else -1
    for rank, value in enumerate(values):
        centre = first + rank * STEP
        start, end = (middle, dot_y + 14 * down), (centre, edge - 4 * down)
        yield _arrow(start, end, colour) if towards_boxes else _arrow(end, start, colour)
        box = {"height": BOX_HEIGHT, "rx": 4, "width": BOX_WIDTH, "x": centre - BOX_WIDTH // 2, "y": boxes_y}
        yield element("rect", fill=WHITE, stroke=INK, **box)
        yield text(f"r{rank}", fill=QUIET, font_size=10, x=centre - 23, y=boxes_y + 12)
        yield text(number(value), font_weight="bold", text_anchor="middle", x=centre + 4, y=boxes_y + 22)
    yield element("circle", cx=middle, cy=dot_y, fill=colour, r=14)
    sign = number(whole) if towards_boxes else "Σ"
    ink = WHITE if colour == BLUE else INK
    yield text(sign, fill=ink, font_size=13, font_weight="bold", text_anchor="middle", x=middle, y=dot_y + 5)
    told = f"{name} = {number(whole)}" if not towards_boxes else name
    yield text(told, x=middle + 24, y=dot_y + 5)


def _arrow(start: tuple[int, int], end: tuple[int, int], colour: str) -> str:
    (x1, y1), (x2, y2) = start, end
    line = element("line", stroke=colour, stroke_width=2, x1=x1, x2=x2, y1=y1, y2=y2)
    length = max(1.0, ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5)
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    back = (x2 - 9 * ux, y2 - 9 * uy)
    corners = [(x2, y2), (back[0] - 4 * uy, back[1] + 4 * ux), (back[0] + 4 * uy, back[1] - 4 * ux)]
    points = " ".join(f"{round(x)},{round(y)}" for x, y in corners)
    return line + element("polygon", fill=colour, points=points)
