"""Which version of its weights each action uses: strips of a schedule with the version's number in the block.

See ``notebooks/08_pipedream.ipynb``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from minimeg.schedule import Action, Timeline
from minimeg.svg import BLUE, IDLE, INK, ORANGE, QUIET, WHITE, WIDTH, element, number, picture, text

LEFT, RIGHT, ROW, GAP = 44, 16, 22, 2
Panel = tuple[str, Sequence[Timeline], Mapping[tuple[int, int, Action], int]]


def version_strips(panels: Sequence[Panel]) -> str:
    """One panel below the other, all on one time axis.

    Args:
        panels: (name, timelines that follow each other, {(which timeline, rank, action): version}).
    """
    longest = max(sum(line.makespan for line in lines) for _, lines, _ in panels)
    unit = (WIDTH - LEFT - RIGHT) / longest
    parts = [
        *(
            element("rect", fill=colour, height=12, width=12, x=14 + 110 * i, y=14) + text(words, x=32 + 110 * i, y=24)
            for i, (colour, words) in enumerate(((BLUE, "F forward"), (ORANGE, "B backward"), (IDLE, "idle")))
        ),
        text("the number is the version of the weights", fill=QUIET, x=344, y=24),
    ]
    y = 50
    for name, lines, versions in panels:
        parts.append(text(name, font_size=13, font_weight="bold", x=14, y=y))
        stages = lines[0].schedule.stages
        total = sum(line.makespan for line in lines)
        for rank in range(stages):
            top = y + 8 + rank * ROW
            parts.append(text(f"r{rank}", text_anchor="end", x=LEFT - 10, y=top + 15))
            parts.append(element("rect", fill=IDLE, height=ROW - GAP, width=round(total * unit), x=LEFT, y=top))
            parts += _blocks(lines, versions, rank, top, unit)
        parts.append(text(f"{number(total)} slots", fill=QUIET, x=LEFT, y=y + 22 + stages * ROW))
        y += 8 + stages * ROW + 44
    sentence = "Versions of the weights. " + "; ".join(
        f"{name}: {number(sum(line.makespan for line in lines))} slots, {most_alive(versions)} at most in use at once on a rank"
        for name, lines, versions in panels
    )
    return picture(y - 16, "The weight versions that each action uses", sentence + ".", *parts)


def most_alive(versions: Mapping[tuple[int, int, Action], int]) -> int:
    """The most versions that the micro-batches in flight on one rank use at once. ``versions`` in the order of each rank's actions."""
    most = 1
    in_flight: dict[int, dict[int, int]] = {}  # rank -> {micro-batch: version}
    for (_, rank, action), version in versions.items():
        held = in_flight.setdefault(rank, {})
        if action.kind == "F":
            held[action.microbatch] = version
            most = max(most, len(set(held.values())))
        else:
            held.pop(action.microbatch)
    return most


def _blocks(
    lines: Sequence[Timeline], versions: Mapping[tuple[int, int, Action], int], rank: int, top: int, unit: float
) -> Iterator[str]:
    begin = 0.0
    for which, line in enumerate(lines):
        for span in line.spans[rank]:
            x = LEFT + round((begin + span.start) * unit)
            end = LEFT + round((begin + span.end) * unit)
            forward = span.action.kind == "F"
            yield element(
                "rect", fill=BLUE if forward else ORANGE, height=ROW - GAP, stroke=WHITE, width=end - x, x=x, y=top
            )
            words = str(versions[which, rank, span.action])
            yield text(
                words,
                fill=WHITE if forward else INK,
                font_size=11 if end - x > 7 * len(words) else 8,
                text_anchor="middle",
                x=(x + end) // 2,
                y=top + 14,
            )
        begin += line.makespan
