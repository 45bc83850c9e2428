"""A softmax whose numbers nobody holds together: one logit a rank, three numbers that travel, and the gradient.

See ``notebooks/04_cross_entropy.ipynb``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minimeg.svg import BLUE, INK, ORANGE, QUIET, element, picture, text

LEFT, STEP, BAR = 170, 100, 44
BASE, TALLEST = 130, 76  # where the logits stand, and the height of the largest
LINES = (186, 220, 254)  # the three reductions
GRADIENT_BASE, GRADIENT_UNIT = 340, 84
END = 560


def cross_entropy(logits: Sequence[float] | None = None, target: int = 3) -> str:
    """Logits as bars over their ranks, the three reductions as lines that collect from them, the gradient as bars beneath."""
    z = [math.log(rank + 1) for rank in range(4)] if logits is None else list(logits)
    columns = [LEFT + STEP * rank for rank in range(len(z))]
    exps = [math.exp(value) for value in z]
    largest, total = max(z), sum(exps)
    parts = [
        *_bars(columns, z, BASE, TALLEST / largest, BLUE, ["logits,", "one a rank"]),
        *_collect(columns, LINES[0], range(len(z)), [f"{value:.3g}" for value in z], "MAX", f"{largest:.4g}"),
        *_collect(columns, LINES[1], range(len(z)), [f"{value:.3g}" for value in exps], "SUM of exp", f"{total:.4g}"),
        *_collect(columns, LINES[2], [target], [f"{z[target]:.3g}"], "target's logit", f"{z[target]:.4g}"),
    ]
    for rank, x in enumerate(columns):
        parts.append(text(f"r{rank}", fill=QUIET, text_anchor="middle", x=x, y=BASE + 18))
    gradient = [value / total - (rank == target) for rank, value in enumerate(exps)]
    parts += _bars(
        columns, gradient, GRADIENT_BASE, GRADIENT_UNIT, ORANGE, ["gradient:", "softmax, less 1", "at the target"]
    )
    loss = math.log(total) - z[target]
    for i, line in enumerate((f"loss = ln {total:.4g} - {z[target]:.4g}", f"= {loss:.4f}")):
        parts.append(text(line, font_size=14, font_weight="bold", x=END + 39 * i, y=LINES[2] + 38 + 20 * i))
    parts.append(
        text(f"its gradient adds up to {abs(round(sum(gradient), 6)):g}", fill=QUIET, x=END, y=GRADIENT_BASE + 4)
    )
    sentence = (
        "Three numbers travel, whatever the size of the vocabulary: the maximum, the sum of the exponentials, and the target's "
        "logit, which one rank has. Then each rank knows the loss, and the gradient of its own logits without another word."
    )
    return picture(GRADIENT_BASE + 78, "cross entropy over four ranks", sentence, *parts)


def _bars(columns: list[int], values: list[float], base: int, unit: float, colour: str, name: list[str]) -> list[str]:
    edge = {"x1": columns[0] - 46, "x2": columns[-1] + 46, "y1": base, "y2": base}
    parts = [text(line, fill=QUIET, x=14, y=base - 20 + 16 * i) for i, line in enumerate(name)]
    for x, value in zip(columns, values, strict=True):
        height = round(abs(value) * unit)
        top = base - height if value >= 0 else base
        parts.append(element("rect", fill=colour, height=height, width=BAR, x=x - BAR // 2, y=top))
        y = top - 6 if value >= 0 else top + height + 15
        parts.append(text(f"{value:.3g}", font_weight="bold", text_anchor="middle", x=x, y=y))
    return [*parts, element("line", stroke=INK, **edge)]


def _collect(columns: list[int], y: int, ranks: Sequence[int], values: list[str], name: str, result: str) -> list[str]:
    """A line that starts at the first rank that has something to say and ends at the result."""
    parts = [element("line", stroke=BLUE, stroke_width=2, x1=columns[ranks[0]], x2=END - 16, y1=y, y2=y)]
    for rank, value in zip(ranks, values, strict=True):
        parts.append(element("circle", cx=columns[rank], cy=y, fill=BLUE, r=5))
        parts.append(text(value, fill=QUIET, font_size=11, text_anchor="middle", x=columns[rank], y=y - 9))
    parts.append(element("polygon", fill=BLUE, points=f"{END - 16},{y - 5} {END - 16},{y + 5} {END - 6},{y}"))
    parts.append(text(f"{name} = {result}", font_weight="bold", x=END, y=y + 4))
    return parts
