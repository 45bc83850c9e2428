"""Who said what to whom: the ledger that counts bytes and the flight recorder that explains a failure.

Every operation of :mod:`minimeg.comm` passes through both. The **ledger** answers "how much did we send?" and is compared with
the formulas of the papers; the **flight recorder** answers "what were we doing when it broke?".

Two columns, always: ``payload`` is the size of the full tensor an operation is about (S), ``wire`` is what one rank puts on the
network under the ring algorithms, with t ranks (Patarasuk & Yuan 2009; Thakur et al. 2005):

    all_reduce                2 (t - 1)/t S        it is a reduce_scatter followed by an all_gather
    all_gather                  (t - 1)/t S        S: the gathered tensor
    reduce_scatter              (t - 1)/t S        S: the tensor that is scattered
    all_to_all, broadcast       (t - 1)/t S
    send                                  S        recv: 0, the sender pays

See it run: ``notebooks/02_f_and_g.ipynb``, or ``python -m torch.distributed.run --nproc-per-node 2 -m minimeg.demos.f_and_g``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch


def wire_bytes(op: str, payload: int, size: int) -> int | float:
    """Bytes one of ``size`` ranks sends for an operation on ``payload`` bytes (ring formula; table above)."""
    if op == "send":
        return payload
    if op in ("recv", "barrier"):
        return 0
    share = (2 if op == "all_reduce" else 1) * (size - 1) * payload
    return share // size if share % size == 0 else share / size


@dataclass(frozen=True)
class Record:
    """One operation as this rank saw it. ``payload`` and ``wire`` in bytes; ``phase`` is "forward", "backward" or a label."""

    op: str
    group: str
    payload: int
    wire: int | float
    phase: str


@dataclass
class Ledger:
    """The operations recorded between ``with ledger() as book:`` and its end, in order, as this rank issued them."""

    records: list[Record] = field(default_factory=list)

    def total(
        self,
        field: Literal["wire", "payload", "count"] = "wire",
        group: str | None = None,
        op: str | None = None,
        phase: str | None = None,
    ) -> int | float:
        """Sum of ``wire`` or ``payload`` bytes, or the ``count``, over the records that match the given filters."""
        if field not in ("wire", "payload", "count"):
            raise ValueError(f'field must be "wire", "payload" or "count", got {field!r}')
        chosen = [
            r
            for r in self.records
            if (group is None or r.group == group)
            and (op is None or r.op == op)
            and (phase is None or r.phase == phase)
        ]
        return len(chosen) if field == "count" else sum(getattr(r, field) for r in chosen)

    def table(self) -> str:
        """One line a kind of operation: ``all_reduce tp x4 payload 512 B wire 512 B forward``."""
        kinds = dict.fromkeys((r.op, r.group, r.phase) for r in self.records)  # a set that keeps the order of first use
        rows = [
            f"{op:<14} {group:<10} x{self.total('count', group, op, phase):<5} "
            f"payload {self.total('payload', group, op, phase):>12,} B   "
            f"wire {self.total('wire', group, op, phase):>12,} B   {phase}"
            for op, group, phase in kinds
        ]
        return "\n".join(rows) if rows else "(nothing was sent)"


@dataclass
class Entry:
    """One line of the flight recorder. ``seconds`` is None while the operation has not ended."""

    number: int
    op: str
    group: str
    what: str
    started: float
    seconds: float | None = None

    def __str__(self) -> str:
        state = "NOT FINISHED" if self.seconds is None else f"{self.seconds * 1e3:.1f} ms"
        return f"#{self.number:<5} {self.op:<14} {self.group:<10} {self.what:<40} {state}"


class FlightRecorder:
    """A ring buffer with the last operations of this process, and the ledgers that are open in it."""

    def __init__(self, length: int = 64) -> None:
        self.entries: deque[Entry] = deque(maxlen=length)
        self.ledgers: list[Ledger] = []
        self.observers: list[Callable[[Entry], None]] = []  # called at the start of each operation (minimeg.faults)
        self.label: str | None = None
        self._count = 0

    def phase(self) -> str:
        """The label given by :func:`phase`; without one, "backward" inside the autograd engine and "forward" elsewhere."""
        if self.label is not None:
            return self.label
        return "backward" if torch._C._current_graph_task_id() >= 0 else "forward"

    def start(self, op: str, group: str, what: str, payload: int, size: int) -> Entry:
        self._count += 1
        entry = Entry(self._count, op, group, what, time.perf_counter())
        self.entries.append(entry)
        for book in self.ledgers:
            book.records.append(Record(op, group, payload, wire_bytes(op, payload, size), self.phase()))
        for observer in self.observers:
            observer(entry)
        return entry

    def finish(self, entry: Entry) -> None:
        entry.seconds = time.perf_counter() - entry.started

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))


# One per process, like the process group it watches. It holds a history, never parallel state: nothing is looked up in it.
RECORDER = FlightRecorder()


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Count every operation of this process until the block ends. Ledgers nest; each sees everything inside its block.

    >>> with ledger() as book:
    ...     pass
    >>> book.total("wire")
    0
    """
    book = Ledger()
    RECORDER.ledgers.append(book)
    try:
        yield book
    finally:
        # By identity: two ledgers with equal records are still two ledgers.
        RECORDER.ledgers[:] = [other for other in RECORDER.ledgers if other is not book]


@contextmanager
def phase(label: str) -> Iterator[None]:
    """Name what the operations inside belong to, e.g. ``with phase("optimizer"):``; shown in the ledger's last column."""
    previous, RECORDER.label = RECORDER.label, label
    try:
        yield
    finally:
        RECORDER.label = previous
