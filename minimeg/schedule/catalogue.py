"""Every schedule by the name that the command lines use.

See the list: ``python -m minimeg.schedule --help``.
"""

from __future__ import annotations

from minimeg.schedule.actions import Schedule, refuse
from minimeg.schedule.dualpipe import dualpipe_v
from minimeg.schedule.orders import forward_only, gpipe, interleaved, one_f_one_b
from minimeg.schedule.pipedream import pipedream, pipedream_2bw
from minimeg.schedule.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v

ONE_CHUNK = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
}
TWO_CHUNKS = {"zb-v": zero_bubble_v, "dualpipe-v": dualpipe_v}
NAMES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "forward-only",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe-v",
    "pipedream",
    "pipedream-2bw",
)


def build(
    name: str, stages: int, microbatches: int, chunks: int | None = None, group_size: int | None = None
) -> Schedule:
    """A schedule by name; ``NAMES`` lists them.

    Args:
        chunks: n, for "interleaved" (2 if None) and "forward-only" (1 if None). The others have a fixed number, and for them 1 and None
            mean that one.
        group_size: g, for "interleaved" only.

    Raises:
        ValueError: an unknown name, or numbers that the schedule does not take, all faults in one message.
    """
    faults = []
    if name not in NAMES:
        faults.append(f"schedule {name!r} is unknown; use one of {', '.join(NAMES)}")
    fixed = 2 if name in TWO_CHUNKS else 1 if name in ONE_CHUNK else None
    if fixed is not None and chunks not in (None, 1, fixed):
        faults.append(f"chunks={chunks}: {name} has {fixed} a rank; leave it out or use interleaved")
    if group_size is not None and name != "interleaved":
        faults.append(f"group_size={group_size} is for interleaved only; leave it out")
    refuse(faults, "cannot build the schedule")
    if name == "interleaved":
        return interleaved(stages, microbatches, 2 if chunks is None else chunks, group_size)
    if name == "forward-only":
        return forward_only(stages, microbatches, 1 if chunks is None else chunks)
    return {**ONE_CHUNK, **TWO_CHUNKS}[name](stages, microbatches)
