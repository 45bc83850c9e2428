"""How a grid of ranks looks as SVG. It lies as everywhere in the course, and as the text table that ``print(grid)`` gives:

pipeline stages downwards (the forward pass falls), tensor-parallel ranks as touching cells side by side, context-parallel ranks as
parts of one cell, data-parallel replicas as separate blocks to the right. A machine (node) is a dashed box around its ranks.

See it: ``Grid(16, tp=2, pp=4).svg(selected_rank=5, ranks_per_node=8)`` in a notebook.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from minimeg.svg import BLUE, GREEN, INK, WHITE, WIDTH, element, picture, text

if TYPE_CHECKING:
    from minimeg.grid import Grid

MARGIN, TOP = 14, 38
CELL_HEIGHT, STAGE_GAP, HEADING_GAP = 48, 30, 20
DP_GAP, EP_GAP = 26, 12
NARROWEST_CELL, WIDEST_CELL = 36, 92
PALE, NODE, SLOW = "#BBBBBB", "#767676", "#D55E00"
# Each axis has a colour, a dash pattern and a width, so that none is told by colour alone; dp is a double line, pp ends in an arrow.
STYLE = {
    "tp": (BLUE, None, 4),
    "cp": (GREEN, "0 7", 4),
    "ep": ("#8C510A", "9 4 2 4", 3),
    "dp": ("#CC79A7", None, 6),
    "pp": (INK, None, 2),
}
MEANING = {
    "tp": ("tensor", "side by side"),
    "cp": ("context", "parts of a cell"),
    "ep": ("expert", "neighbouring blocks"),
    "dp": ("data", "blocks to the right"),
    "pp": ("pipeline", "downwards"),
}


@dataclass(frozen=True)
class Layout:
    """Where each rank's cell lies. Blocks that do not fit side by side continue in a further band below."""

    grid: Grid
    columns_per_band: int
    cell: int  # width

    @classmethod
    def of(cls, grid: Grid) -> Layout:
        columns = grid.dp * grid.ep * grid.tp
        block = grid.ep * grid.tp
        if cls(grid, block, NARROWEST_CELL).right > WIDTH - MARGIN:
            block = grid.tp
        fit = block
        while fit < columns and cls(grid, fit + block, NARROWEST_CELL).right <= WIDTH - MARGIN:
            fit += block
        bands = -(-columns // fit)
        per_band = -(-(columns // block) // bands) * block  # spread evenly: 8 + 8 blocks rather than 11 + 5
        cell = WIDEST_CELL
        while cell > NARROWEST_CELL and cls(grid, per_band, cell).right > WIDTH - MARGIN:
            cell -= 1
        return cls(grid, per_band, cell)

    @property
    def left(self) -> int:
        return MARGIN + 40 * (self.grid.pp > 1) + 40 * (self.grid.cp > 1)

    @property
    def right(self) -> int:
        return self.x(self.columns_per_band - 1) + self.cell

    @property
    def headings(self) -> list[str]:
        return [axis for axis in ("dp", "ep", "tp") if self.grid.sizes[axis] > 1]

    @property
    def band_height(self) -> int:
        stages = self.grid.pp * self.grid.cp * CELL_HEIGHT + (self.grid.pp - 1) * STAGE_GAP
        return 16 * len(self.headings) + HEADING_GAP + stages + 22

    @property
    def bottom(self) -> int:
        columns = self.grid.dp * self.grid.ep * self.grid.tp
        return TOP + -(-columns // self.columns_per_band) * self.band_height

    def gap_before(self, column: int) -> int:
        """Between this column and the one to its left, in one band."""
        if column % self.grid.tp:
            return 0
        return EP_GAP if column % (self.grid.tp * self.grid.ep) else DP_GAP

    def x(self, column: int) -> int:
        """Left edge of a column, counted within its band."""
        return self.left + column * self.cell + sum(self.gap_before(j) for j in range(1, column + 1))

    def y(self, band: int, row: int) -> int:
        """Upper edge of a row; there are pp * cp of them in a band."""
        top = TOP + band * self.band_height + 16 * len(self.headings) + HEADING_GAP
        return top + row * CELL_HEIGHT + row // self.grid.cp * STAGE_GAP

    def place(self, rank: int) -> tuple[int, int, int]:
        """-> (band, row, column within the band)."""
        at = self.grid.coordinates(rank)
        column = (at["dp"] * self.grid.ep + at["ep"]) * self.grid.tp + at["tp"]
        return column // self.columns_per_band, at["pp"] * self.grid.cp + at["cp"], column % self.columns_per_band

    def corner(self, rank: int) -> tuple[int, int]:
        band, row, column = self.place(rank)
        return self.x(column), self.y(band, row)


def draw(grid: Grid, selected_rank: int | None, ranks_per_node: int | None) -> str:
    layout = Layout.of(grid)
    axes = [axis for axis, size in grid.sizes.items() if size > 1]
    legend, sentence = _legend(grid, axes, selected_rank, ranks_per_node, layout.bottom)
    parts = [
        text(grid.summary, font_size=13, font_weight="bold", x=MARGIN, y=22),
        *_cells(layout, selected_rank),
        *_headings(layout),
    ]
    if ranks_per_node is not None:
        parts += _nodes(layout, ranks_per_node)
    if selected_rank is not None:
        for axis in axes:
            parts += _lines(layout, axis, _group_of(grid, axis, selected_rank), ranks_per_node)
    parts += legend
    height = layout.bottom + 22 * max(1, len(legend) // 2)
    if layout.right + MARGIN > WIDTH:  # one tensor-parallel group is wider than the picture
        scale = WIDTH / (layout.right + MARGIN)
        parts, height = [element("g", *parts, transform=f"scale({scale:.3f})")], round(height * scale)
    return picture(height, grid.summary, sentence, *parts)


def _group_of(grid: Grid, axis: str, rank: int) -> list[int]:
    return next(group for group in grid.groups(axis) if rank in group)


def _cells(layout: Layout, selected_rank: int | None) -> Iterator[str]:
    c = layout.grid.cp
    for rank in range(layout.grid.world_size):
        x, y = layout.corner(rank)
        outline = INK if c == 1 else PALE
        yield element("rect", fill=WHITE, height=CELL_HEIGHT, stroke=outline, width=layout.cell, x=x, y=y)
        weight = "bold" if rank == selected_rank else None
        middle = x + layout.cell // 2
        yield text(f"r{rank}", font_weight=weight, text_anchor="middle", x=middle, y=y + 29)
        if c > 1 and layout.place(rank)[1] % c == c - 1:  # the outline of the cell of which this rank is the last part
            top, height = y - (c - 1) * CELL_HEIGHT, c * CELL_HEIGHT
            yield element("rect", fill="none", height=height, stroke=INK, width=layout.cell, x=x, y=top)
    if selected_rank is not None:
        x, y = layout.corner(selected_rank)
        yield element("rect", fill="none", height=CELL_HEIGHT, stroke=INK, stroke_width=3, width=layout.cell, x=x, y=y)


def _headings(layout: Layout) -> Iterator[str]:
    """Names of the columns above each band and of the rows to its left."""
    grid, per_band = layout.grid, layout.columns_per_band
    spans = {"dp": grid.ep * grid.tp, "ep": grid.tp, "tp": 1}
    columns = grid.dp * grid.ep * grid.tp
    for band in range(-(-columns // per_band)):
        top = layout.y(band, 0)
        first, last = band * per_band, min(columns, (band + 1) * per_band)
        for line, axis in enumerate(reversed(layout.headings)):
            span = min(spans[axis], last - first)
            for start in range(first, last, span):
                left = layout.x(start - first)
                right = layout.x(min(start + span, last) - 1 - first) + layout.cell
                label = f"{axis} {start // spans[axis] % grid.sizes[axis]}"
                y = top - HEADING_GAP + 1 - 16 * line
                yield text(label, text_anchor="middle", x=(left + right) // 2, y=y)
        for row in range(grid.pp * grid.cp):
            y = layout.y(band, row)
            if grid.cp > 1:
                label = f"cp {row % grid.cp}"
                yield text(label, text_anchor="end", x=layout.left - 12, y=y + 29)
            if grid.pp > 1 and row % grid.cp == 0:
                middle = y + grid.cp * CELL_HEIGHT // 2 + 5
                yield text(f"pp {row // grid.cp}", x=MARGIN, y=middle)


def _nodes(layout: Layout, ranks_per_node: int) -> Iterator[str]:
    """A dashed box around each machine's ranks: one, or several where its ranks do not lie in one rectangle."""
    grid = layout.grid
    for node, start in enumerate(range(0, grid.world_size, ranks_per_node)):
        places = {layout.place(rank) for rank in range(start, min(start + ranks_per_node, grid.world_size))}
        for band, top, bottom, first, last in _rectangles(places):
            # The box keeps a distance from its cells, but where a cell of another machine touches, it stays inside.
            left = layout.x(first) - (8 if first == 0 or layout.gap_before(first) else -3)
            ends = last + 1 == layout.columns_per_band or layout.gap_before(last + 1)
            right = layout.x(last) + layout.cell + (8 if ends else -3)
            upper = layout.y(band, top) - (8 if top % grid.cp == 0 else -3)
            lower = layout.y(band, bottom) + CELL_HEIGHT + (8 if (bottom + 1) % grid.cp == 0 else -3)
            box = {"height": lower - upper, "rx": 9, "width": right - left, "x": left, "y": upper}
            yield element("rect", fill="none", stroke=NODE, stroke_dasharray="6 4", stroke_width=1, **box)
            yield _haloed(f"node {node}", right - 8, upper + 3, NODE, "end")


def _rectangles(places: set[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int, int]]:
    """Cover cells (band, row, column) by rectangles (band, top, bottom, first, last): runs of a row, equal runs merged downwards."""
    runs: dict[tuple[int, int, int], list[int]] = {}
    for band, row, column in sorted(places):
        if (band, row, column - 1) not in places:
            last = column
            while (band, row, last + 1) in places:
                last += 1
            runs.setdefault((band, column, last), []).append(row)
    for (band, first, last), rows in runs.items():
        for row in rows:
            if row - 1 not in rows:
                bottom = row
                while bottom + 1 in rows:
                    bottom += 1
                yield band, row, bottom, first, last


def _haloed(words: str, x: int, y: int, colour: str, anchor: str) -> str:
    """Small text that stays readable on top of lines."""
    halo = {"paint_order": "stroke", "stroke": WHITE, "stroke_linejoin": "round", "stroke_width": 5}
    return text(words, fill=colour, font_size=10, text_anchor=anchor, x=x, y=y, **halo)


def _lines(layout: Layout, axis: str, group: list[int], ranks_per_node: int | None) -> Iterator[str]:
    """A group as a line with a stop at each member; each axis keeps its own track through the cells, so lines never hide another."""
    edge = min(10, layout.cell // 8)
    dx = {"pp": edge, "cp": layout.cell - edge}.get(axis, layout.cell // 2)
    dy = {"dp": 6, "ep": 6 if layout.grid.dp == 1 else 15, "tp": CELL_HEIGHT - 7}.get(axis, CELL_HEIGHT // 2)
    stops = {rank: (layout.corner(rank)[0] + dx, layout.corner(rank)[1] + dy) for rank in group}
    words = []
    for a, b in pairwise(group):
        (x1, y1), (x2, y2) = stops[a], stops[b]
        slow = ranks_per_node is not None and a // ranks_per_node != b // ranks_per_node
        if layout.place(a)[0] == layout.place(b)[0]:
            yield _link(axis, x1, y1, x2, y2, slow)
        else:  # the next band: leave on the right, come back on the left
            yield _link(axis, x1, y1, layout.right + 10, y1, slow)
            yield _link(axis, layout.left - 10, y2, x2, y2, slow)
            x2, y2 = layout.right + 10, y1
        if slow and axis == "pp":  # beside the arrow, in the gap below the stage that it leaves
            band, row, _ = layout.place(a)
            end_of_stage = layout.y(band, row // layout.grid.cp * layout.grid.cp + layout.grid.cp - 1) + CELL_HEIGHT
            words.append(_haloed("slow", x1 + 6, end_of_stage + STAGE_GAP // 2 + 3, SLOW, "start"))
        elif slow:  # on the line; between parts of a cell above the border, where the name of a node may stand
            lift = 6 if x1 == x2 else -4
            words.append(_haloed("slow", (x1 + x2) // 2, (y1 + y2) // 2 - lift, SLOW, "middle"))
    for x, y in stops.values():
        yield element("circle", cx=x, cy=y, fill=STYLE[axis][0], r=4, stroke=WHITE, stroke_width=1)
    yield from words


def _link(axis: str, x1: int, y1: int, x2: int, y2: int, slow: bool = False) -> str:
    colour, dashes, width = (SLOW, "6 4", 3) if slow else STYLE[axis]
    ends = {"x1": x1, "x2": x2, "y1": y1, "y2": y2}
    cap = "round" if axis == "cp" and not slow else None
    line = element("line", stroke=colour, stroke_dasharray=dashes, stroke_linecap=cap, stroke_width=width, **ends)
    if axis == "dp" and not slow:
        line += element("line", stroke=WHITE, stroke_width=2, **ends)
    if axis == "pp":  # the arrow of the forward pass; its tip stops short of the next stop's dot
        tip = (
            f"{x2 - 4},{y2 - 13} {x2 + 4},{y2 - 13} {x2},{y2 - 5}"
            if x1 == x2
            else f"{x2 - 13},{y2 - 4} {x2 - 13},{y2 + 4} {x2 - 5},{y2}"
        )
        line += element("polygon", fill=colour, points=tip)
    return line


def _legend(
    grid: Grid, axes: list[str], selected_rank: int | None, ranks_per_node: int | None, top: int
) -> tuple[list[str], str]:
    """Two elements a line beneath the picture, and the sentence that says in words what it shows."""
    if selected_rank is None:
        sentence = "; ".join(f"{axis} ({MEANING[axis][0]}) {MEANING[axis][1]}" for axis in axes) or "one rank alone"
        return [text(sentence, x=MARGIN, y=top + 8)], f"{grid.summary}: {sentence}."
    parts, said = [], []
    for line, axis in enumerate(axes):
        group, y = _group_of(grid, axis, selected_rank), top + 8 + 22 * line
        names = [f"r{rank}" for rank in group]
        members = " ".join(names if len(names) <= 9 else [*names[:6], "..", *names[-2:]])
        row = f"{axis} ({MEANING[axis][0]}), {len(group)} ranks: {members}"
        if ranks_per_node is not None:
            leaving = sum(a // ranks_per_node != b // ranks_per_node for a, b in pairwise(group))
            row += f", {leaving} of {len(group) - 1} links between nodes: slow" if leaving else ", inside one node"
        said.append(row)
        parts.append(_link(axis, MARGIN, y - 4, MARGIN + 36, y - 4))
        parts.append(text(row, x=MARGIN + 48, y=y))
    return parts, f"{grid.summary}. Groups of rank {selected_rank}: {'; '.join(said) or 'itself alone'}."
