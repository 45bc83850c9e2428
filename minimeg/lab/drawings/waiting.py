"""Who waits for whom, as a picture: a deadlock is a ring. See ``notebooks/06_pipelines.ipynb``."""

from __future__ import annotations

from collections.abc import Sequence

from minimeg.svg import INK, WIDTH, element, picture, text

WRONG = "#D55E00"
BOX_WIDTH, BOX_HEIGHT, TOP, GAP = 220, 64, 52, 150


def ring_of_two(stands_in: Sequence[str], waits_for: Sequence[str]) -> str:
    """Two ranks, each in a call that only the other could end.

    Args:
        stands_in: the call in which rank 0, and rank 1, stands.
        waits_for: what the other one would have to do.
    """
    left = (WIDTH - 2 * BOX_WIDTH - GAP) // 2
    right = left + BOX_WIDTH + GAP
    parts = [
        text("deadlock", fill=WRONG, font_size=13, font_weight="bold", x=14, y=22),
        *_box(left, "r0", stands_in[0]),
        *_box(right, "r1", stands_in[1]),
        *_arrow(left + BOX_WIDTH, right, TOP + 16, waits_for[0], above=True),
        *_arrow(right, left + BOX_WIDTH, TOP + BOX_HEIGHT - 16, waits_for[1], above=False),
    ]
    sentence = (
        f"Rank 0 stands in {stands_in[0]} and waits for rank 1; rank 1 stands in {stands_in[1]} and waits for rank 0: the arrows "
        "form a ring, so neither ever goes on."
    )
    return picture(TOP + BOX_HEIGHT + 34, "A ring of two ranks that wait for each other", sentence, *parts)


def _box(x: int, rank: str, call: str) -> list[str]:
    middle = x + BOX_WIDTH // 2
    return [
        element(
            "rect", fill="none", height=BOX_HEIGHT, rx=6, stroke=INK, stroke_width=1.5, width=BOX_WIDTH, x=x, y=TOP
        ),
        text(rank, font_weight="bold", text_anchor="middle", x=middle, y=TOP + 26),
        text(f"in {call}", text_anchor="middle", x=middle, y=TOP + 46),
    ]


def _arrow(start: int, end: int, y: int, words: str, *, above: bool) -> list[str]:
    back = -8 if end > start else 8
    return [
        element("line", stroke=WRONG, stroke_dasharray="6 4", stroke_width=2, x1=start, x2=end + back, y1=y, y2=y),
        element("path", d=f"M{end} {y}l{back} -5v10z", fill=WRONG),
        text(words, text_anchor="middle", x=(start + end) // 2, y=y - 8 if above else y + 18),
    ]
