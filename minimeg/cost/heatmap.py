"""All layouts in one picture: t to the right, p downwards, and in each cell the best that these two allow.

Darker blue is a higher model FLOPs utilisation, which stands in the cell too, above what was chosen there and the memory it takes. A
grey cell has legal layouts, none of which fits, and says how much the smallest needs; an empty one has none. The best is framed. Axes
lie as everywhere in the course. All numbers in the SVG are whole.

See it: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --svg layouts.svg``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minimeg.cost.estimate import Estimate
from minimeg.cost.hardware import GB
from minimeg.cost.planner import Plan, fastest
from minimeg.schedule.actions import refuse
from minimeg.svg import BLUE, IDLE, INK, QUIET, WHITE, WIDTH, element, picture, text, tint

LEFT, TOP, MARGIN = 72, 112, 16
CELL_HEIGHT, WIDEST = 50, 128
WRONG = "#D55E00"
STEPS = 8  # shades


@dataclass(frozen=True)
class Cell:
    """The best layout of one t and p; where none fits ``best`` is None, and ``least`` the bytes of the smallest."""

    tensor: int
    pipeline: int
    best: Estimate | None
    least: float


def cells(plan: Plan) -> list[Cell]:
    """One for every t and p that have a legal layout."""
    found = []
    for t, p in sorted({(layout.tensor, layout.pipeline) for _, layout in plan.sizes}):
        here = [pair for pair in plan.candidates if (pair[1].tensor, pair[1].pipeline) == (t, p)]
        best, _ = fastest(plan.job, here, 1)
        least = min(size for size, layout in plan.sizes if (layout.tensor, layout.pipeline) == (t, p))
        found.append(Cell(t, p, best[0] if best else None, least))
    return found


def heat_map(plan: Plan) -> str:
    """The plan as SVG text, 760 px wide.

    Raises:
        ValueError: no layout is legal.
    """
    refuse([] if plan.sizes else ["no layout is legal; change the number of GPUs or the batch"], "cannot draw")
    drawn = cells(plan)
    columns = sorted({cell.tensor for cell in drawn})
    rows = sorted({cell.pipeline for cell in drawn})
    width = min(WIDEST, (WIDTH - LEFT - MARGIN) // len(columns))
    winner = plan.best[0] if plan.best else None
    shades = _Shades([cell.best.mfu for cell in drawn if cell.best])
    job = plan.job
    title = f"Layouts of {job.gpus} x {job.gpu.name}: L={job.shape.layers} h={job.shape.hidden} a={job.shape.heads} B={job.batch}"
    inside = [
        text(title, font_size=15, font_weight="bold", x=MARGIN, y=28),
        *_legend(shades),
        *_axes(columns, rows, width),
    ]
    for cell in drawn:
        x, y = LEFT + columns.index(cell.tensor) * width, TOP + rows.index(cell.pipeline) * CELL_HEIGHT
        inside += _cell(cell, shades, x, y, width)
    if winner:
        x = LEFT + columns.index(winner.layout.tensor) * width
        y = TOP + rows.index(winner.layout.pipeline) * CELL_HEIGHT
        frame = {"height": CELL_HEIGHT - 2, "width": width - 2, "x": x, "y": y}
        inside.append(element("rect", fill="none", stroke=WRONG, stroke_width=4, **frame))
    bottom = TOP + len(rows) * CELL_HEIGHT + 20
    sentence = _sentence(drawn, winner)
    inside.append(text(sentence, fill=INK, x=MARGIN, y=bottom))
    return picture(bottom + 16, title, sentence, *inside)


class _Shades:
    """From pale to full blue in steps, from the lowest utilisation to the highest."""

    def __init__(self, values: list[float]) -> None:
        self.low, self.high = min(values, default=0.0), max(values, default=0.0)

    def step(self, value: float) -> int:
        """0 is the palest."""
        span = self.high - self.low
        return min(STEPS - 1, int((value - self.low) / span * STEPS)) if span else STEPS - 1

    def fill(self, step: int) -> str:
        return BLUE if step == STEPS - 1 else tint(BLUE, 0.1 + 0.68 * step / (STEPS - 2))

    def ink(self, step: int) -> str:
        """Contrast is at least 4.5 : 1; between the last two shades there would be blues on which neither ink has that."""
        return WHITE if step == STEPS - 1 else INK


def _cell(cell: Cell, shades: _Shades, x: int, y: int, width: int) -> Iterator[str]:
    box = {"height": CELL_HEIGHT - 2, "width": width - 2, "x": x, "y": y}
    middle = x + width // 2 - 1
    if cell.best is None:
        yield element("rect", fill=IDLE, **box)
        yield text("does not fit", fill=INK, font_size=11, text_anchor="middle", x=middle, y=y + 20)
        yield text(f"{cell.least / GB:.0f} GB", fill=INK, font_size=10, text_anchor="middle", x=middle, y=y + 36)
        return
    step = shades.step(cell.best.mfu)
    ink, layout = shades.ink(step), cell.best.layout
    yield element("rect", fill=shades.fill(step), **box)
    head = f"{cell.best.mfu:.0%}"
    yield text(head, fill=ink, font_size=13, font_weight="bold", text_anchor="middle", x=middle, y=y + 16)
    chosen = f"d{layout.data} n{layout.chunks} b{layout.microbatch}"
    yield text(chosen, fill=ink, font_size=10, text_anchor="middle", x=middle, y=y + 29)
    memory = f"{layout.recompute} {cell.best.memory_bytes / GB:.0f} GB"
    yield text(memory, fill=ink, font_size=10, text_anchor="middle", x=middle, y=y + 41)


def _legend(shades: _Shades) -> Iterator[str]:
    yield text(
        "in a cell: model FLOPs utilisation; d, chunks n, micro-batch b; recomputation and GB per GPU", x=MARGIN, y=50
    )
    for step in range(STEPS):
        yield element("rect", fill=shades.fill(step), height=12, width=20, x=MARGIN + 20 * step, y=60)
    words = f"{shades.low:.0%} to {shades.high:.0%}"
    right = MARGIN + 20 * STEPS
    yield text(words, x=right + 8, y=70)
    yield element("rect", fill="none", height=10, stroke=WRONG, stroke_width=4, width=18, x=right + 112, y=61)
    yield text("the best", x=right + 138, y=70)
    yield element("rect", fill=IDLE, height=12, width=20, x=right + 212, y=60)
    yield text("nothing fits: the least memory of all", x=right + 238, y=70)


def _axes(columns: list[int], rows: list[int], width: int) -> Iterator[str]:
    for i, t in enumerate(columns):
        yield text(f"t={t}", fill=QUIET, text_anchor="middle", x=LEFT + i * width + width // 2 - 1, y=TOP - 8)
    for i, p in enumerate(rows):
        yield text(f"p={p}", fill=QUIET, text_anchor="end", x=LEFT - 8, y=TOP + i * CELL_HEIGHT + CELL_HEIGHT // 2 + 3)


def _sentence(drawn: list[Cell], winner: Estimate | None) -> str:
    without = sum(cell.best is None for cell in drawn)
    if winner is None:
        return f"None of {len(drawn)} combinations of t and p fits the memory."
    unfit = f"; {without} of {len(drawn)} combinations of t and p do not fit" if without else ""
    return f"Best is {winner.layout}: MFU {winner.mfu:.0%}, {winner.days:.1f} days{unfit}."
