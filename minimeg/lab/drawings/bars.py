"""Horizontal bars to one scale, the number at the end of each. See ``notebooks/11_recomputation.ipynb``."""

from __future__ import annotations

from collections.abc import Mapping

from minimeg.svg import BLUE, IDLE, INK, WIDTH, element, number, picture, text, tint

LEFT, RIGHT, TOP, STEP, THICK = 170, 90, 44, 34, 22


def bars(values: Mapping[str, float], *, title: str, sentence: str, chosen: str | None = None) -> str:
    """One bar for each name -> value >= 0; the ``chosen`` one is dark and has a border."""
    room, largest = WIDTH - LEFT - RIGHT, max(*values.values(), 1e-12)
    parts = [text(title, font_size=13, font_weight="bold", x=14, y=24)]
    for index, (name, value) in enumerate(values.items()):
        y, width = TOP + index * STEP, round(room * value / largest)
        dark = chosen in (None, name)
        weight = "bold" if name == chosen else None
        parts.append(element("rect", fill=IDLE, height=THICK, width=room, x=LEFT, y=y))
        fill, border = (BLUE, INK if name == chosen else None) if dark else (tint(BLUE, 0.4), None)
        parts.append(element("rect", fill=fill, height=THICK, stroke=border, stroke_width=2, width=width, x=LEFT, y=y))
        parts.append(text(name, font_weight=weight, text_anchor="end", x=LEFT - 12, y=y + 15))
        parts.append(text(number(value), font_weight="bold", x=LEFT + room + 10, y=y + 15))
    return picture(TOP + len(values) * STEP + 6, title, sentence, *parts)
