"""Which ranks share a dropout mask: each rank's mask beside each other's, as a square of fractions.

See ``notebooks/11_recomputation.ipynb``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from minimeg.svg import BLUE, IDLE, INK, QUIET, WHITE, WIDTH, element, picture, text

LEFT, GAP, TOP = 62, 52, 66
LARGEST = 27  # a cell's side at most


def shared_masks(panels: Mapping[str, Sequence[Sequence[float]]], labels: Sequence[str], sentence: str = "") -> str:
    """One square a panel: blue where two ranks draw the same mask, else in how many of 100 elements theirs agree.

    Args:
        panels: title -> n x n fractions, as :func:`minimeg.rng.agreement` gives them.
        labels: of the ranks, e.g. "r0  tp0 dp0 pp0"; the first word stands above the columns.
        sentence: what there is to see.
    """
    n = len(labels)
    faults = [title for title, square in panels.items() if [len(row) for row in square] != [n] * n]
    if faults or not panels:
        raise ValueError(
            f"each panel must hold {n} x {n} fractions, one row a label; not so: {', '.join(faults) or 'no panel'}"
        )
    left = LEFT + 6 * max(0, max(map(len, labels)) - 6)
    side = min(LARGEST, (WIDTH - left - 16 - GAP * (len(panels) - 1)) // (n * len(panels)))
    width = n * side + GAP
    bottom = TOP + n * side
    parts = [
        text(label, fill=QUIET, font_size=11, text_anchor="end", x=left - 8, y=TOP + row * side + side // 2 + 4)
        for row, label in enumerate(labels)
    ]
    for index, (title, square) in enumerate(panels.items()):
        parts += _panel(title, square, [label.split()[0] for label in labels], left + index * width, side)
    parts += _legend(left, bottom + 18)
    told = sentence or "Blue where two ranks draw the same mask; elsewhere theirs agree by chance alone."
    return picture(bottom + 44, "Which ranks share a dropout mask", told, *parts)


def _panel(title: str, square: Sequence[Sequence[float]], names: Sequence[str], x: int, side: int) -> Iterator[str]:
    yield text(title, font_size=13, font_weight="bold", x=x, y=26)
    for column, name in enumerate(names):
        yield text(name, fill=QUIET, font_size=11, text_anchor="middle", x=x + column * side + side // 2, y=TOP - 8)
    for row, fractions in enumerate(square):
        for column, fraction in enumerate(fractions):
            same = fraction == 1
            at = {"x": x + column * side, "y": TOP + row * side}
            yield element("rect", fill=BLUE if same else IDLE, height=side - 1, width=side - 1, **at)
            middle = {"x": at["x"] + (side - 1) // 2, "y": at["y"] + side // 2 + 4}
            ink = WHITE if same else INK
            yield text(f"{100 * fraction:.0f}", fill=ink, font_size=10, text_anchor="middle", **middle)


def _legend(x: int, y: int) -> Iterator[str]:
    for colour, words in ((BLUE, "the same mask (100 of 100 elements)"), (IDLE, "another mask (agrees by chance)")):
        yield element("rect", fill=colour, height=14, stroke=QUIET, width=14, x=x, y=y)
        yield text(words, x=x + 22, y=y + 11)
        x += 290
