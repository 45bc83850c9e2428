"""Curves as SVG: a few series over steps, thick ones beneath thin ones, so that equal curves look like one line.

matplotlib draws the curves of a long run (:mod:`minimeg.plots`); these are for notebooks, where a stored picture is compared as text.
See ``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from minimeg.svg import BLUE, GREEN, INK, ORANGE, QUIET, WIDTH, element, number, picture, round_steps, text

LEFT, RIGHT, TOP, HEIGHT = 56, 170, 40, 190
# Line width, colour and dashes of the first, second, .. series: told apart without colour, too.
STYLES = ((7, BLUE, None), (2, INK, "6 4"), (2, ORANGE, None), (2, GREEN, "2 3"))


def line_chart(
    series: Mapping[str, Sequence[float]], *, title: str, sentence: str, across: str = "step", up: str = "loss"
) -> str:
    """One line for each series (name -> value at 0, 1, ..), the first thick and pale, each named at its end.

    Args:
        sentence: what there is to see.
        across, up: names of the axes.
    """
    highest = max(max(values) for values in series.values())
    lowest = min(0.0, *(min(values) for values in series.values()))
    steps = max(len(values) for values in series.values()) - 1
    width = WIDTH - LEFT - RIGHT

    def at(step: float, value: float) -> tuple[int, int]:
        return LEFT + round(width * step / steps), TOP + round(HEIGHT * (highest - value) / (highest - lowest))

    parts = [text(title, font_size=13, font_weight="bold", x=14, y=22)]
    for mark in round_steps(highest, max(highest - lowest, 1e-9) / 5):
        _, y = at(0, float(mark))
        parts.append(element("line", stroke="#E5E5E5", x1=LEFT, x2=LEFT + width, y1=y, y2=y))
        parts.append(text(mark, fill=QUIET, text_anchor="end", x=LEFT - 8, y=y + 4))
    for mark in round_steps(steps, max(1.0, steps / 5)):
        x, _ = at(float(mark), 0)
        parts.append(text(mark, fill=QUIET, text_anchor="middle", x=x, y=TOP + HEIGHT + 18))
    parts.append(text(across, fill=QUIET, text_anchor="end", x=LEFT + width, y=TOP + HEIGHT + 34))
    parts.append(text(up, fill=QUIET, x=14, y=TOP - 2))
    parts += _curves(series, at)
    return picture(TOP + HEIGHT + 44, title, sentence, *parts)


def _curves(series: Mapping[str, Sequence[float]], at: Callable[[float, float], tuple[int, int]]) -> Iterator[str]:
    ends = []
    for (name, values), (thickness, colour, dashes) in zip(series.items(), STYLES, strict=False):
        points = [at(step, value) for step, value in enumerate(values)]
        path = " ".join(f"{x},{y}" for x, y in points)
        opacity = 0.5 if thickness > 4 else None
        yield element("polyline", fill="none", points=path, stroke=colour, stroke_dasharray=dashes,
                      stroke_linejoin="round", stroke_opacity=opacity, stroke_width=thickness)  # fmt: skip
        ends.append((points[-1], f"{name}, {number(round(values[-1], 3))}", colour, dashes, thickness))
    heights = [end[0][1] for end in ends]
    for i in range(1, len(heights)):  # names of curves that end together stand below each other
        heights[i] = (
            max(heights[i], heights[i - 1] + 18) if any(abs(a - heights[i]) < 18 for a in heights[:i]) else heights[i]
        )
    for ((x, _), words, colour, dashes, thickness), y in zip(ends, heights, strict=True):
        line = {"x1": x + 8, "x2": x + 30, "y1": y, "y2": y}
        yield element("line", stroke=colour, stroke_dasharray=dashes, stroke_opacity=0.5 if thickness > 4 else None,
                      stroke_width=thickness, **line)  # fmt: skip
        yield text(words, x=x + 36, y=y + 4)
