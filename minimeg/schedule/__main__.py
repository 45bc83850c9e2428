"""Look at a schedule without running it: ``python -m minimeg.schedule 1f1b --pp 4 --microbatches 8 --svg out.svg``.

    one schedule         its table, bubble, peaks and messages; the whole output is a table that --file reads back
    --compare            several side by side, drawn on one time axis
    --file mine.txt      a table of your own: proven first, and if it cannot run, why

Times are those of a whole stage; in a schedule without W, B takes backward + weight.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minimeg.schedule.actions import Schedule, ScheduleError
from minimeg.schedule.catalogue import NAMES, build
from minimeg.schedule.proof import Proof, prove
from minimeg.schedule.simulation import simulate
from minimeg.schedule.timeline import Timeline


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 for a schedule that cannot run; 2 for arguments that do not fit."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        schedules = _schedules(options)
        proofs = [prove(schedule) for schedule in schedules]
        times = (options.forward, options.backward, options.weight, options.comm)
        timelines = [simulate(schedule, *times) for schedule in schedules]
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    memory = (options.activation, options.weight_part)
    if options.compare:
        print(comparison(proofs, timelines, *memory))
    else:
        print("\n\n".join(map(lambda p, t: report(p, t, *memory), proofs, timelines)))
    if options.svg:
        options.svg.write_text(_picture(timelines), encoding="utf-8")
    return 0


def report(proof: Proof, timeline: Timeline, activation: float = 1.0, weight_part: float = 0.0) -> str:
    """The table of a schedule and, as comments in it, what is known of it."""
    schedule = proof.schedule
    lines = {
        "makespan": _number(timeline.makespan),
        "bubble": f"{timeline.bubble_of_ideal:.2%} of ideal time, {timeline.bubble_of_total:.2%} of total time",
        "spans": f"{_numbers(timeline.stage_spans)}  (each rank from its first start to its last end)",
        "in flight": f"{_numbers(proof.peak_in_flight)}  (chunk activations held at the peak, proven)",
        "memory": f"{_numbers(timeline.peak_memory(activation, weight_part))}  (activations of a whole stage at the peak)",
        "messages": f"{proof.messages}, in one global order: no deadlock",
    }
    return "\n".join([str(schedule), *(f"# {name:9} {text}" for name, text in lines.items())])


def comparison(
    proofs: Sequence[Proof], timelines: Sequence[Timeline], activation: float = 1.0, weight_part: float = 0.0
) -> str:
    """One line a schedule; memory is that of the fullest rank."""
    rows = [("schedule", "makespan", "span", "bubble/ideal", "bubble/total", "in flight", "memory", "messages")]
    for proof, timeline in zip(proofs, timelines, strict=True):
        rows.append(
            (
                proof.schedule.name,
                _number(timeline.makespan),
                _number(max(timeline.stage_spans)),
                f"{timeline.bubble_of_ideal:.2%}",
                f"{timeline.bubble_of_total:.2%}",
                str(max(proof.peak_in_flight)),
                _number(max(timeline.peak_memory(activation, weight_part))),
                str(proof.messages),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def _picture(timelines: Sequence[Timeline]) -> str:
    from minimeg.schedule.drawing import gantt, gantt_stack

    if len(timelines) == 1:
        return gantt(timelines[0])
    return gantt_stack([(timeline.schedule.name, timeline) for timeline in timelines])


def _schedules(options: argparse.Namespace) -> list[Schedule]:
    files = [Schedule.parse(file.read_text(encoding="utf-8")) for file in options.file]
    names = options.names
    if not names and not files:
        if not options.compare:
            raise ValueError(f"name a schedule ({', '.join(NAMES)}) or give --file")
        names = [name for name in NAMES if name != "forward-only"]
    if names and (options.pp is None or options.microbatches is None):
        raise ValueError("give --pp and --microbatches, such as --pp 4 --microbatches 8")
    chunked = ("interleaved", "forward-only")  # in a comparison the others keep their own number
    return files + [
        build(
            name,
            options.pp,
            options.microbatches,
            options.chunks if name in chunked or len(names) == 1 else None,
            options.group_size if name == "interleaved" or len(names) == 1 else None,
        )
        for name in names
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minimeg.schedule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    add("--file", type=Path, action="append", default=[], help="a table of actions, one line a rank; may be repeated")
    add("--pp", "--stages", type=int, help="pipeline ranks p")
    add("--microbatches", "-m", type=int, help="micro-batches m")
    add("--chunks", "--vpp", type=int, help="chunks per rank n, for interleaved and forward-only")
    add(
        "--group-size",
        type=int,
        help="interleaved: micro-batches that pass a chunk before the next one begins; p if left out",
    )
    add("--forward", type=float, default=1.0, help="time of F of a whole stage (%(default)s)")
    add("--backward", type=float, default=1.0, help="time of the input gradient of a whole stage (%(default)s)")
    add("--weight", type=float, default=1.0, help="time of the weight gradient of a whole stage (%(default)s)")
    add("--comm", type=float, default=0.0, help="latency of a message between ranks (%(default)s)")
    add("--activation", type=float, default=1.0, help="memory of a micro-batch in a whole stage (%(default)s)")
    add("--weight-part", type=float, default=0.0, help="the part of it that stays from B until W (%(default)s)")
    add("--compare", action="store_true", help="one line each; all of them if none is named")
    add("--svg", type=Path, metavar="FILE", help="draw the Gantt chart")
    return parser


def _number(value: float) -> str:
    return f"{value:.10g}"


def _numbers(values: Sequence[float]) -> str:
    return " ".join(map(_number, values))


if __name__ == "__main__":
    sys.exit(main())
