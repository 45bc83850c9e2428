"""A pipeline schedule is data: for each rank, the list of what it does, in order.

    F0.3   the forward of micro-batch 3 through chunk 0 of this rank
    B0.3   its backward; where the schedule is split, only the gradient of the input, for which another rank is waiting
    W0.3   the gradient of the weights, for which nobody is waiting (zero bubble, Qi et al. 2023, arXiv 2401.10241)

Nothing here says when, or who sends what to whom: the times follow from the order (``simulation.py``), the messages too
(``messages.py``), and whether an order can run at all is proven (``proof.py``). A model is cut into p * n *virtual stages*; a
rank holds n of them, its chunks (Narayanan et al. 2021, section 2.2, arXiv 2104.04473). A placement says which:

    loop   virtual stage = chunk * p + rank          p=4:  rank 0 holds 0 4, rank 1 holds 1 5, rank 2 holds 2 6, rank 3 holds 3 7
    v      rank, then 2p - 1 - rank (two chunks)     p=4:  rank 0 holds 0 7, rank 1 holds 1 6, rank 2 holds 2 5, rank 3 holds 3 4

See it run: ``python -m minimeg.schedule 1f1b --pp 4 --microbatches 8``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

KINDS = "FBW"
PLACEMENTS = ("loop", "v")
UPDATES = ("flush", "each", "2bw")

_ACTION = re.compile(r"([FBW])(?:(\d+)\.)?(\d+)", re.ASCII)
_HEADER = ("name", "stages", "microbatches", "chunks", "placement", "updates")
_IDLE = "-"  # the line of a rank that does nothing


class ScheduleError(ValueError):
    """A schedule that cannot run: an action is missing, doubled or misplaced, or ranks wait for each other in a circle."""


class Action(NamedTuple):
    """One piece of work of one rank: ``str(Action("F", 3, 0)) == "F0.3"``.

    Attributes:
        kind: "F" forward, "B" backward, "W" weight gradient.
        microbatch: 0..m-1.
        chunk: 0..n-1, counted on the rank.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"

    def __repr__(self) -> str:  # lists of actions are read often, and then the short form is the clear one
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """ "F0.3", or "F3" for chunk 0. ValueError for anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; write F0.3: the kind F, B or W, then chunk, dot, micro-batch")
        kind, chunk, microbatch = match.groups()
        return cls(kind, int(microbatch), int(chunk or 0))


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order. Whether it is complete and can run is for ``prove`` to say.

    Attributes:
        name: for titles and messages.
        stages: p, the number of pipeline ranks.
        microbatches: m.
        chunks: n, chunks per rank.
        ranks: per rank a tuple of actions.
        placement: which virtual stages a rank holds: "loop" or "v".
        updates: when weights change: "flush" after all micro-batches; "each" after every backward (PipeDream); "2bw" (PipeDream-2BW).

    Raises:
        ValueError: sizes that do not fit together, all faults in one message.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    placement: str = "loop"
    updates: str = "flush"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        faults = size_faults(stages=self.stages, microbatches=self.microbatches, chunks=self.chunks)
        if not self.name or self.name != self.name.strip() or re.search(r"[=\n\r]", self.name):
            faults.append(f"name={self.name!r} must be one line of text without '=', such as 'mine'")
        if len(self.ranks) != self.stages:
            faults.append(
                f"stages={self.stages} wants {self.stages} lists of actions, one a rank, got {len(self.ranks)}"
            )
        if self.placement not in PLACEMENTS:
            faults.append(f"placement={self.placement!r} is not one of {', '.join(PLACEMENTS)}")
        if self.placement == "v" and self.chunks != 2:
            faults.append(
                f"placement='v' has two chunks a rank, got chunks={self.chunks}; use chunks=2 or placement='loop'"
            )
        if self.updates not in UPDATES:
            faults.append(f"updates={self.updates!r} is not one of {', '.join(UPDATES)}")
        refuse(faults, f"schedule {self.name!r}")

    @cached_property
    def split(self) -> bool:
        """True if the weight gradients are actions of their own. Then every B has its W."""
        return any(action.kind == "W" for row in self.ranks for action in row)

    @cached_property
    def forward_only(self) -> bool:
        """True if nothing but F occurs, as in evaluation. Then no activation is kept."""
        return all(action.kind == "F" for row in self.ranks for action in row)

    @property
    def virtual_stages(self) -> int:
        """p * n, into how many parts the model is cut."""
        return self.stages * self.chunks

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Which part of the model a rank holds as its chunk, 0..p*n-1."""
        if not (0 <= rank < self.stages and 0 <= chunk < self.chunks):
            raise ValueError(
                f"rank {rank}, chunk {chunk} is not in {self.name!r}: ranks are 0..{self.stages - 1}, chunks 0..{self.chunks - 1}"
            )
        if self.placement == "v" and chunk == 1:
            return 2 * self.stages - 1 - rank
        return chunk * self.stages + rank

    def rank_of(self, virtual_stage: int) -> int:
        """The rank that holds a virtual stage."""
        chunk, place = self.chunk_of(virtual_stage), virtual_stage % self.stages
        return self.stages - 1 - place if self.placement == "v" and chunk == 1 else place

    def chunk_of(self, virtual_stage: int) -> int:
        """Which chunk of its rank a virtual stage is."""
        if not 0 <= virtual_stage < self.virtual_stages:
            raise ValueError(
                f"virtual stage {virtual_stage} is not in {self.name!r}: they are 0..{self.virtual_stages - 1}"
            )
        return virtual_stage // self.stages

    def sender(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Who makes what an action needs from a neighbouring virtual stage: F from the one before, B from the one after.

        None at the ends of the model and for W.
        """
        step = {"F": -1, "B": +1}.get(action.kind)
        stage = -1 if step is None else self.virtual_stage(rank, action.chunk) + step
        if not 0 <= stage < self.virtual_stages:
            return None
        return self.rank_of(stage), Action(action.kind, action.microbatch, self.chunk_of(stage))

    def __str__(self) -> str:
        """A header, then one line a rank; ``Schedule.parse`` reads it back."""
        header = "# " + " ".join(f"{key}={getattr(self, key)}" for key in _HEADER)
        return "\n".join([header, *(" ".join(map(str, row)) or _IDLE for row in self.ranks)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a table: one line a rank, actions such as F0.3 B1.3 W1.3 separated by blanks.

        The header line of ``str(schedule)`` may be left out, wholly or in part; then the number of lines gives p, the largest
        numbers give m and n, the placement is "loop" and updates "flush". Empty lines and comments (#) are skipped; "-" is a rank
        that does nothing. "F3" is read as "F0.3" where there is only one chunk.

        Raises:
            ValueError: what cannot be read, all faults in one message.
        """
        lines = [line.strip() for line in text.splitlines()]
        header, faults = _read_header(lines)
        words = [line.split("#")[0].split() for line in lines if line.split("#")[0].strip()]
        ranks, short = [], []
        for rank, row in enumerate(words):
            actions = []
            for word in [] if row == [_IDLE] else row:
                try:
                    actions.append(Action.parse(word))
                except ValueError as error:
                    faults.append(f"rank {rank}: {error}")
                    continue
                if "." not in word:
                    short.append((rank, word))
            ranks.append(tuple(actions))
        every = [action for row in ranks for action in row]
        if not words and not faults:
            faults.append("there is no action in it; write one line a rank, such as 'F0.0 B0.0'")
        chunks = header.get("chunks", 1 + max((action.chunk for action in every), default=0))
        if chunks != 1:
            faults += [f"rank {rank}: {word} does not name its chunk, and there are {chunks}" for rank, word in short]
        refuse(faults, "this table of actions")
        inferred = {
            "name": "custom",
            "stages": len(ranks),
            "microbatches": 1 + max(action.microbatch for action in every) if every else 1,
            "chunks": chunks,
        }
        return cls(**{**inferred, **header, "ranks": tuple(ranks)})  # type: ignore[arg-type]


def size_faults(**sizes: int) -> list[str]:
    """One sentence for each size that is not a whole number of at least 1."""
    return [
        f"{name}={value!r} must be a whole number, at least 1"
        for name, value in sizes.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]


def refuse(faults: list[str], what: str, error: type[ValueError] = ValueError) -> None:
    """Raise one error that names all faults, if there are any."""
    if faults:
        raise error(f"{what}: " + "; ".join(faults) if len(faults) == 1 else f"{what}:\n  " + "\n  ".join(faults))


def _read_header(lines: list[str]) -> tuple[dict[str, int | str], list[str]]:
    """The values of the line "# name=... stages=...", if there is one, and what is wrong with them."""
    header: dict[str, int | str] = {}
    faults = []
    for line in lines:
        if not re.match(rf"#\s*({'|'.join(_HEADER)})=", line):
            continue
        for item in re.split(r"\s+(?=\w+=)", line.lstrip("# ")):
            key, _, value = item.partition("=")
            if key not in _HEADER:
                faults.append(f"the header has an unknown field {key!r}; it may have {', '.join(_HEADER)}")
            elif key in header:
                faults.append(f"the header gives {key} twice")
            elif key in ("stages", "microbatches", "chunks"):
                if value.isdecimal():
                    header[key] = int(value)
                else:
                    faults.append(f"the header has {key}={value!r}, which is not a whole number")
            else:
                header[key] = value
    return header, faults
