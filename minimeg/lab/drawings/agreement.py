"""Curves that should be one, and by how much they are not: losses above, their distance from the first of them below, on a log axis.

See ``notebooks/13_all_together.ipynb``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log10

from minimeg.svg import BLUE, GREEN, INK, ORANGE, QUIET, WHITE, WIDTH, element, picture, round_steps, text

LEFT, RIGHT, TOP = 64, 212, 52
ABOVE, BETWEEN, BELOW = 170, 64, 130
LOWEST, HIGHEST = -16, -11  # powers of ten; a distance of 0 has a line of its own beneath
# Colour and mark of each curve: told apart without colour, too.
STYLES = ((BLUE, "circle"), (ORANGE, "square"), (GREEN, "diamond"), ("#CC79A7", "triangle"), ("#56B4E9", "bar"))


def agreement(
    alone: Sequence[float], others: Mapping[str, Sequence[float]], *, title: str, reference: str = "1 process"
) -> str:
    """``others``: up to five curves, drawn beneath each other, each thinner than the one before; ``alone`` is thin and dashed on top.

    ValueError: more than five, or curves of other lengths than ``alone``.
    """
    if len(others) > len(STYLES) or any(len(curve) != len(alone) for curve in others.values()):
        lengths = {name: len(curve) for name, curve in others.items()}
        raise ValueError(
            f"agreement draws up to {len(STYLES)} curves of {len(alone)} values like the first, got {lengths}"
        )
    width, steps = WIDTH - LEFT - RIGHT, max(1, len(alone) - 1)
    high = max(map(max, [alone, *others.values()]))
    floor_ = TOP + ABOVE + BETWEEN + BELOW

    def across(step: int) -> int:
        return LEFT + round(width * step / steps)

    def up(loss: float) -> int:
        return TOP + round(ABOVE * (high - loss) / high)

    def apart(distance: float) -> int:
        """Beyond the top it stays at the top; 0 has its own line at the bottom."""
        if distance == 0:
            return floor_
        power = min(max(log10(distance), LOWEST), HIGHEST)
        return TOP + ABOVE + BETWEEN + round((BELOW - 24) * (HIGHEST - power) / (HIGHEST - LOWEST))

    parts = [text(title, font_size=13, font_weight="bold", x=14, y=22), text("loss", fill=QUIET, x=14, y=TOP - 10)]
    for mark in round_steps(high, high / 5):
        parts += _line(mark, up(float(mark)), width)
    parts.append(text(f"|difference| from {reference}", fill=QUIET, x=14, y=TOP + ABOVE + BETWEEN - 16))
    for power in range(LOWEST, HIGHEST + 1):
        parts += _line(f"1e{power}", apart(10.0**power), width)
    parts += _line("0", floor_, width)
    for mark in round_steps(steps, max(1.0, steps / 6)):
        parts += [text(mark, fill=QUIET, text_anchor="middle", x=across(int(mark)), y=floor_ + 20)]
    parts.append(text("step", fill=QUIET, text_anchor="end", x=LEFT + width, y=floor_ + 36))
    for index, (name, curve) in enumerate(others.items()):
        colour, mark = STYLES[index]
        points = " ".join(f"{across(step)},{up(loss)}" for step, loss in enumerate(curve))
        thick = 15 - 3 * index
        parts.append(_curve(points, colour, thick))
        y = TOP + 12 + 24 * index
        parts.append(_curve(f"{LEFT + width + 14},{y} {LEFT + width + 40},{y}", colour, thick))
        parts += [*_mark(mark, LEFT + width + 54, y, colour), text(name, x=LEFT + width + 66, y=y + 4)]
        for step, (loss, right) in enumerate(zip(curve, alone, strict=True)):
            parts += _mark(mark, across(step), apart(abs(loss - right)), colour)
    points = " ".join(f"{across(step)},{up(loss)}" for step, loss in enumerate(alone))
    parts.append(_curve(points, INK, 1.5, "5 4"))
    y = TOP + 12 + 24 * len(others)
    parts += [_curve(f"{LEFT + width + 14},{y} {LEFT + width + 40},{y}", INK, 1.5, "5 4")]
    parts.append(text(reference, x=LEFT + width + 66, y=y + 4))
    return picture(floor_ + 46, title, _sentence(alone, others, reference), *parts)


def _sentence(alone: Sequence[float], others: Mapping[str, Sequence[float]], reference: str) -> str:
    largest = max(abs(a - b) for curve in others.values() for a, b in zip(curve, alone, strict=True))
    bound = f"at most 1e{ceil(log10(largest))}" if largest > 0 else "0"
    count = {1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five"}[len(others)]
    return f"{count} curves and the dashed one of {reference} lie on each other; the differences, beneath on a log axis, are {bound}."


def _line(words: str, y: int, width: int) -> Iterator[str]:
    yield element("line", stroke="#E5E5E5", x1=LEFT, x2=LEFT + width, y1=y, y2=y)
    yield text(words, fill=QUIET, text_anchor="end", x=LEFT - 10, y=y + 4)


def _curve(points: str, colour: str, thick: float, dashes: str | None = None) -> str:
    return element("polyline", fill="none", points=points, stroke=colour, stroke_dasharray=dashes,
                   stroke_linejoin="round", stroke_width=thick)  # fmt: skip


def _mark(shape: str, x: int, y: int, colour: str) -> Iterator[str]:
    look = {"fill": colour, "stroke": WHITE, "stroke_width": 0.5}
    if shape == "circle":
        yield element("circle", cx=x, cy=y, r=4, **look)
        return
    way = {
        "square": "m-4 -4h8v8h-8z",
        "diamond": "m0 -5l5 5l-5 5l-5 -5z",
        "triangle": "m0 -5l5 9h-10z",
        "bar": "m-6 -1.5h12v3h-12z",
    }
    yield element("path", d=f"M{x} {y}{way[shape]}", **look)
