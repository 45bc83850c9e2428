"""Two matrices cut over the ranks, with their numbers: columns first and then rows, or the wrong way round.

A shard is a band with the name of its rank; a partial sum is a whole matrix with a sigma. See ``notebooks/03_parallel_linears.ipynb``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minimeg.svg import BLUE, INK, QUIET, WHITE, element, number, picture, text, tint

Matrix = Sequence[Sequence[float]]
Cut = Literal["columns", "rows"]

CELL, ROW, GAP = 30, 24, 9  # width and height of a number's cell; gap between the bands of two ranks
TOP = 40
WRONG = "#D55E00"

X: Matrix = [[1, 2], [3, 4]]
A: Matrix = [[1, -1, 2, 0], [0, 1, -1, 1]]
B: Matrix = [[1, 0], [2, 1], [0, 3], [1, 1]]


@dataclass(frozen=True)
class Placed:
    """Drawn elements, and where they end."""

    parts: list[str]
    right: int
    bottom: int


def columns_then_rows(t: int = 2, frames: int = 4) -> str:
    """relu(X A) B with A cut by columns and B by rows over t = 1, 2 or 4 ranks; the first ``frames`` of 4 steps."""
    hidden = relu(matmul(X, A))
    width = len(B) // t
    partial = [
        matmul([row[r * width : (r + 1) * width] for row in hidden], B[r * width : (r + 1) * width]) for r in range(t)
    ]
    steps = [
        ("1  X whole everywhere, A by columns", _product(("X", X, None), ("A", A, "columns"), t)),
        ("2  relu(X A): whole columns, nothing to say", _product(("relu(X A)", hidden, "columns"), None, t)),
        ("3  those columns meet the same rows of B", _product(("relu(X A)", hidden, "columns"), ("B", B, "rows"), t)),
        ("4  partial sums: the one all-reduce", _sum(partial, matmul(hidden, B), "Z")),
    ]  # fmt: skip
    sentence = (
        f"A is cut by columns over {t} rank{'s' if t > 1 else ''}, so each holds whole columns of relu(X A); B is cut by the matching "
        "rows, so each gets a partial sum of all of Z, and one all-reduce adds them up."
    )
    return _story(f"columns first, then rows, t = {t}", sentence, steps[:frames])


def rows_first(t: int = 2, frames: int = 4) -> str:
    """What goes wrong if A is cut by rows (t = 1 or 2): relu of a partial sum is not a part of the relu."""
    width = len(A) // t
    partial = [
        matmul([row[r * width : (r + 1) * width] for row in X], A[r * width : (r + 1) * width]) for r in range(t)
    ]
    rectified = [relu(part) for part in partial]
    total = [[sum(part[i][j] for part in rectified) for j in range(len(A[0]))] for i in range(len(X))]
    right = relu(matmul(X, A))
    verdict = "equal to relu(X A)" if total == right else "not relu(X A)"
    steps = [
        ("1  X by columns, A by rows", _product(("X", X, "columns"), ("A", A, "rows"), t)),
        ("2  partial sums of X A", _side_by_side(partial, "Σ")),
        ("3  relu of each partial sum", _side_by_side(rectified, "relu Σ")),
        (f"4  their sum: {verdict}", _pair(("their sum", total), ("relu(X A)", right))),
    ]
    sentence = (
        "A is cut by rows, so each rank holds a partial sum, and relu of a partial sum is no part of the relu: "
        f"the sum is {verdict}."
    )
    return _story(f"rows first, t = {t}", sentence, steps[:frames])


def matmul(left: Matrix, right: Matrix) -> list[list[float]]:
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*right, strict=True)] for row in left
    ]


def relu(matrix: Matrix) -> list[list[float]]:
    return [[max(0, value) for value in row] for row in matrix]


# ---- frames ------------------------------------------------------------------------------------------------------------------


def _story(title: str, sentence: str, steps: list[tuple[str, Placed]]) -> str:
    """Frames, two in a line, read like a page."""
    parts = [text(title, font_size=14, font_weight="bold", x=14, y=24)]
    y = TOP
    for start in range(0, len(steps), 2):
        line = steps[start : start + 2]
        height = 40 + max(content.bottom for _, content in line)
        for x, (words, content) in zip((14, 386), line, strict=False):
            parts.append(element("rect", fill=WHITE, height=height, rx=6, stroke="#BBBBBB", width=360, x=x, y=y))
            parts.append(text(words, font_weight="bold", x=x + 10, y=y + 18))
            scale = min(1.0, 340 / content.right)
            move = f"translate({x + 10} {y + 30})" + (f" scale({scale:.2f})" if scale < 1 else "")
            parts.append(element("g", *content.parts, transform=move))
        y += height + 10
    return picture(y + 4, title, sentence, *parts)


def _matrix(name: str, matrix: Matrix, cut: Cut | None, t: int, x: int, sign: str = "") -> Placed:
    """A matrix with its name above, its bands apart if it is cut, each with its rank's name."""
    rows, columns = len(matrix), len(matrix[0])
    per_row, per_column = (rows // t if cut == "rows" else rows), (columns // t if cut == "columns" else columns)
    left = x + (24 if cut == "rows" else 0)
    parts = [text(f"{name} {sign}".strip(), fill=INK, x=left, y=10)]
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            cell_x = left + j * CELL + j // per_column * GAP
            cell_y = 30 + i * ROW + i // per_row * GAP
            pale = tint(BLUE, 0.16) if cut is not None else WHITE
            parts.append(element("rect", fill=pale, height=ROW, stroke=INK, width=CELL, x=cell_x, y=cell_y))
            parts.append(text(number(value), text_anchor="middle", x=cell_x + CELL // 2, y=cell_y + 16))
    if cut == "columns":
        for r in range(t):
            middle = left + r * (per_column * CELL + GAP) + per_column * CELL // 2
            parts.append(text(f"r{r}", fill=QUIET, font_size=11, text_anchor="middle", x=middle, y=25))
    if cut == "rows":
        for r in range(t):
            middle = 30 + r * (per_row * ROW + GAP) + per_row * ROW // 2 + 4
            parts.append(text(f"r{r}", fill=QUIET, font_size=11, x=x, y=middle))
    bands = t if cut == "columns" else 1
    stacked = t if cut == "rows" else 1
    return Placed(parts, left + columns * CELL + (bands - 1) * GAP, 30 + rows * ROW + (stacked - 1) * GAP)


def _product(left: tuple[str, Matrix, Cut | None], right: tuple[str, Matrix, Cut | None] | None, t: int) -> Placed:
    first = _matrix(*left, t, 0)
    if right is None:
        return first
    dot = text("·", font_size=20, text_anchor="middle", x=first.right + 15, y=62)
    second = _matrix(*right, t, first.right + 30)
    return Placed([*first.parts, dot, *second.parts], second.right, max(first.bottom, second.bottom))


def _sum(partial: Sequence[Matrix], whole: Matrix, name: str) -> Placed:
    placed = _side_by_side(partial, "Σ")
    parts = [*placed.parts, text("=", font_size=16, text_anchor="middle", x=placed.right + 14, y=60)]
    total = _matrix(name, whole, None, 1, placed.right + 28)
    return Placed([*parts, *total.parts], total.right, total.bottom)


def _side_by_side(matrices: Sequence[Matrix], sign: str) -> Placed:
    parts, x, bottom = [], 0, 0
    for r, matrix in enumerate(matrices):
        if r:
            parts.append(text("+", font_size=16, text_anchor="middle", x=x + 12, y=60))
            x += 24
        placed = _matrix(f"r{r}", matrix, None, 1, x, sign)
        parts += placed.parts
        x, bottom = placed.right, placed.bottom
    return Placed(parts, x, bottom)


def _pair(left: tuple[str, Matrix], right: tuple[str, Matrix]) -> Placed:
    """Two matrices beside each other; cells that differ are marked by colour and by a thick border."""
    first = _matrix(*left, None, 1, 0)
    second = _matrix(*right, None, 1, first.right + 40)
    marks = [
        element(
            "rect",
            fill="none",
            height=ROW - 2,
            stroke=WRONG,
            stroke_width=3,
            width=CELL - 2,
            x=j * CELL + 1,
            y=31 + i * ROW,
        )
        for i, row in enumerate(left[1])
        for j, value in enumerate(row)
        if value != right[1][i][j]
    ]
    equal = "=" if not marks else "≠"
    return Placed(
        [
            *first.parts,
            *marks,
            text(equal, font_size=16, text_anchor="middle", x=first.right + 20, y=60),
            *second.parts,
        ],
        second.right,
        second.bottom,
    )
