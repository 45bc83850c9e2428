"""When does a rule fire? A schedule with a flag at the end of each action after which something happens.

See ``notebooks/12_data_parallelism.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minimeg.schedule import Action, Timeline
from minimeg.svg import BLUE, IDLE, INK, ORANGE, QUIET, WHITE, WIDTH, element, picture, text

WRONG, RIGHT = "#D55E00", "#009E73"
LEFT, ROW, HEIGHT, LABEL = 200, 40, 22, 44
Rule = Callable[[Sequence[Action], int], bool]


def flags(line: Timeline, rules: Mapping[str, Rule], right: str) -> str:
    """One panel a rule: the schedule, and a flag behind each backward after which ``rule(row, place)`` holds.

    Args:
        right: the name of the rule whose flags are right; the others' wrong ones are dashed.
    """
    unit = (WIDTH - LEFT - LABEL) / line.makespan
    rows = line.schedule.ranks
    parts, above, y = [], [], 20
    for name, rule in rules.items():
        parts.append(text(name, font_weight="bold", x=14, y=y + ROW))
        for rank, row in enumerate(rows):
            top = y + rank * ROW
            parts.append(text(f"stage {rank}", fill=QUIET, text_anchor="end", x=LEFT - 10, y=top + 16))
            parts.append(element("rect", fill=IDLE, height=HEIGHT, width=round(line.makespan * unit), x=LEFT, y=top))
            for place, span in enumerate(line.spans[rank]):
                x, end = LEFT + round(span.start * unit), LEFT + round(span.end * unit)
                forward = span.action.kind == "F"
                parts.append(
                    element(
                        "rect", fill=BLUE if forward else ORANGE, height=HEIGHT, stroke=WHITE, width=end - x, x=x, y=top
                    )
                )
                words = f"{span.action.kind}{span.action.microbatch}"
                ink = WHITE if forward else INK
                parts.append(text(words, fill=ink, text_anchor="middle", x=(x + end) // 2, y=top + 15))
                if not forward and rule(row, place):
                    good = rules[right](row, place)
                    above += _flag(end, top, good)
        y += len(rows) * ROW + 18
    sentence = (
        "A flag is an all-reduce. Green: after the last backward, right. Dashed: too early, so that what it summed is summed again; "
        f"only '{right}' has one flag a row, at the end."
    )
    return picture(y, "When each rule reduces the buffer", sentence, *parts, *above)


def _flag(x: int, top: int, good: bool) -> list[str]:
    colour, dashes = (RIGHT, None) if good else (WRONG, "3 2")
    return [
        element(
            "line", stroke=colour, stroke_dasharray=dashes, stroke_width=2, x1=x, x2=x, y1=top - 8, y2=top + HEIGHT + 4
        ),
        element("path", d=f"M{x} {top - 8}h12l-3 5l3 5h-12z", fill=colour),
    ]
