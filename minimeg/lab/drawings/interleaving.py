"""Chunks: the way of a micro-batch through n a rank, and which warm-ups run. See ``notebooks/07_interleaved.ipynb``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from minimeg.schedule.chart import shade_of
from minimeg.svg import BLUE, IDLE, INK, QUIET, WHITE, WIDTH, element, number, picture, text, tint

WRONG = "#D55E00"
ROW, BOX, TOP = 46, 30, 58


def loop(p: int, n: int) -> str:
    """Which virtual stage is where: ranks downwards, chunks side by side, one forward through all of them."""
    left, gap = 64, 110 if n <= 3 else 60
    pitch = (WIDTH - 80 + gap) // n
    width = pitch - gap
    parts = [text(f"{p * n} virtual stages on {p} ranks", font_size=15, font_weight="bold", x=16, y=28)]
    parts += [text(f"r{rank}", text_anchor="end", x=left - 14, y=TOP + rank * ROW + BOX // 2 + 4) for rank in range(p)]
    for chunk in range(n):
        x = left + chunk * pitch
        middle = x + width // 2
        for rank in range(p):
            y = TOP + rank * ROW
            fill, ink = shade_of("F", chunk, n), WHITE if chunk == 0 else INK
            words = f"chunk {chunk}: stage {chunk * p + rank}"
            parts.append(element("rect", fill=fill, height=BOX, rx=3, stroke=BLUE, width=width, x=x, y=y))
            parts.append(text(words, fill=ink, text_anchor="middle", x=middle, y=y + BOX // 2 + 4))
            if rank + 1 < p:
                parts += _arrow(f"M{middle} {y + BOX}V{y + ROW - 7}", middle, y + ROW, "v")
        if chunk + 1 < n:
            # From the last rank back to the first: up between the columns.
            start, end, between = x + width, x + pitch, x + (width + pitch) // 2
            low, high = TOP + (p - 1) * ROW + BOX // 2, TOP + BOX // 2
            parts += _arrow(f"M{start} {low}H{between}V{high}H{end - 7}", end, high, "h")
    sentence = (
        f"A forward runs down the ranks, from rank {p - 1} back up to rank 0, and down again: chunk c of rank r is virtual stage "
        f"c x {p} + r. The backward takes the same way in the other direction."
    )
    return picture(TOP + p * ROW, "The loop of interleaved 1F1B", sentence, *parts)


def _arrow(way: str, x: int, y: int, direction: str) -> Iterator[str]:
    head = "l-4 -8h8z" if direction == "v" else "l-8 -4v8z"
    yield element("path", d=way, fill="none", stroke=INK, stroke_width=1.5)
    yield element("path", d=f"M{x} {y}{head}", fill=INK)


def sweep(table: Mapping[str, Sequence[float | None]], columns: Sequence[str], title: str) -> str:
    """A number a cell, darker where more slots pass; None, "stuck", is hatched. The best of a row is framed.

    Args:
        table: name of a row -> one value a column.
        columns: their names.
    """
    names = max(map(len, table), default=0)
    left = 32 + 7 * names
    width = min(96, (WIDTH - left - 16) // len(columns))
    slots = [value for row in table.values() for value in row if value is not None]
    least, most = min(slots), max(slots)
    ground = element("rect", fill=WHITE, height=7, width=7)
    stripe = element("path", d="M1 0V7", stroke=tint(WRONG, 0.35), stroke_width=2)
    size = {"height": 7, "patternTransform": "rotate(45)", "patternUnits": "userSpaceOnUse", "width": 7}
    parts = [
        element("defs", element("pattern", ground, stripe, id="minimeg-stuck", **size)),
        text(title, font_size=15, font_weight="bold", x=16, y=28),
        *(
            text(name, fill=QUIET, text_anchor="middle", x=left + i * width + width // 2, y=TOP - 8)
            for i, name in enumerate(columns)
        ),
    ]
    for index, (name, row) in enumerate(table.items()):
        y = TOP + index * (BOX + 4)
        parts.append(text(name, text_anchor="end", x=left - 12, y=y + BOX // 2 + 4))
        best = min(value for value in row if value is not None)
        for column, value in enumerate(row):
            at = {"height": BOX, "width": width - 4, "x": left + column * width, "y": y}
            middle = {"text_anchor": "middle", "x": at["x"] + (width - 4) // 2, "y": y + BOX // 2 + 4}
            if value is None:
                parts.append(element("rect", fill="url(#minimeg-stuck)", stroke=WRONG, **at))
                parts.append(text("stuck", paint_order="stroke", stroke=WHITE, stroke_width=5, **middle))
                continue
            share = (value - least) / (most - least) if most > least else 0
            fill = tint("#888888", round(0.8 * share**0.5, 2)) if share else IDLE
            frame = {"stroke": INK, "stroke_width": 2} if value == best else {}
            parts.append(element("rect", fill=fill, **frame, **at))
            parts.append(text(number(value), font_weight="bold" if frame else None, **middle))
    sentence = (
        "Slots by warm-up; darker is slower, a frame marks the fastest of a row, hatching means that no rank can go on."
    )
    return picture(TOP + len(table) * (BOX + 4) + 10, title, sentence, *parts)
