"""The black box: what a rank was doing, kept where the others can read it after its death.

A process that is killed says nothing. What it was doing must lie outside it beforehand: each rank writes (step, phase, last operation)
into a small mapped file. Memory mapped from a file outlives the process that wrote it, and a write costs no system call: a microsecond.

    identity     process id, coordinates in the grid                 written once
    place        step, phase, since when                             by the trainer and the pipeline executor: ``BOX.enter("forward")``
    operation    last communication, since when                      by the flight recorder, as its observer
    beat         a counter that goes up while the process is alive   by the watcher thread
    ending       how it ended, when, in one line                     on an exception, a signal, a good end
    trace        the Python stack                                    on an exception; of a survivor, where it stood at the end;
                                                                     by ``faulthandler`` on a crash in C++

Death itself is told by a lock: each rank holds an exclusive ``flock`` on its file for life, and the kernel lets go of it at death, also
at that of a zombie that nobody has waited for yet.

See it run: ``MINIMEG_FAULT=2:3:forward:kill python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2``.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, Literal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from minimeg.ledger import Entry

# What a rank can be busy with, in the order of a training step. MINIMEG_FAULT names one of them.
PHASES = (
    "start",
    "data",
    "forward",
    "message wait",
    "backward",
    "weight gradients",
    "reductions",
    "loss",
    "optimizer",
    "evaluation",
    "gather",
    "shard write",
    "manifest",
    "rename",
    "prune",
)

Memory = bytearray | mmap
Record = tuple[int, struct.Struct]  # offset in the file, layout
Ending = Literal["running", "done", "failed", "lost", "late", "signal"]
_ENDINGS: tuple[Ending, ...] = ("running", "done", "failed", "lost", "late", "signal")

# Offsets in the file. A reader may meet a record half written; its owner is then alive, and the next look shows it whole.
_IDENTITY = (0, struct.Struct("<q96s"))
_PLACE = (128, struct.Struct("<dq32s"))
_OPERATION = (192, struct.Struct("<d248s"))
_BEAT = (448, struct.Struct("<dq"))
_ENDING = (512, struct.Struct("<d504s"))
_HOW = 1024  # one byte, written last: it makes the record above valid
_WAITS = 1025  # one byte: the main thread stands in a communication
TRACE = 2048
SIZE = 32768


@dataclass(frozen=True)
class Snapshot:
    """What the black box of one rank says. Times are those of ``time.monotonic()``, which all processes of a host share.

    ``ending`` is "failed" (an error of its own), "lost" (a peer's connection closed), "late" (a wait ran out of time), "signal",
    "done" or "running". ``alive`` and ``silent`` (seconds without a beat) are what the reader found out.
    """

    rank: int
    pid: int = 0
    coordinates: str = ""
    step: int = -1
    phase: str = "start"
    operation: str = ""
    place_time: float = 0.0
    last_sign: float = 0.0
    ending: Ending = "running"
    ending_time: float = 0.0
    line: str = ""
    trace: str = ""
    waits: bool = False
    alive: bool = True
    silent: float = 0.0

    @property
    def died(self) -> bool:
        """Gone without having said why."""
        return not self.alive and self.ending == "running"

    @property
    def crash(self) -> str:
        """Of a death that ``faulthandler`` saw: "Fatal Python error: Segmentation fault" and the like; else ""."""
        return self.trace.partition("\n")[0] if self.died and self.trace.startswith("Fatal") else ""

    @property
    def time(self) -> float:
        """When it failed; for a death the last sign of life before it."""
        return self.ending_time if self.ending != "running" else self.last_sign

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.coordinates})" if self.coordinates else f"rank {self.rank}"

    @property
    def place(self) -> str:
        where = f"step {self.step}" if self.step >= 0 else "before the first step"
        return f"{where}, phase {self.phase}"


class BlackBox:
    """The writer's side. Without a file (one process, a notebook) it writes into memory of its own, at the same cost."""

    def __init__(self) -> None:
        self._memory: Memory = bytearray(SIZE)
        self.step, self.phase = -1, "start"
        self.on_enter: list[Callable[[int, str], None]] = []  # MINIMEG_FAULT strikes here
        self.planted: set[str] = set()  # faults of kind "nan" and "corrupt", until somebody takes them up

    def attach(self, memory: Memory, coordinates: str) -> None:
        """From now on write into ``memory`` (SIZE bytes of zeros)."""
        self._memory = memory
        self._write(_IDENTITY, os.getpid(), coordinates.encode())
        self.enter("start", -1)

    def enter(self, phase: str, step: int | None = None) -> None:
        """This rank begins with ``phase`` (one of PHASES), of optimizer step ``step`` (counted from 0) if a new one begins."""
        self.phase = phase
        if step is not None:
            self.step = step
        self._write(_PLACE, time.monotonic(), self.step, phase.encode())
        for react in self.on_enter:
            react(self.step, phase)

    def take(self, kind: str) -> bool:
        """Is a fault of this kind planted? It is not afterwards."""
        there = kind in self.planted
        self.planted.discard(kind)
        return there

    def operation(self, entry: Entry) -> None:
        """Observer of ``minimeg.ledger.RECORDER``: a communication begins."""
        self._write(_OPERATION, time.monotonic(), f"{entry.op} {entry.what} over {entry.group}".encode())

    def beat(self, count: int) -> None:
        self._write(_BEAT, time.monotonic(), count)

    def end(self, ending: Ending, line: str = "", trace: str = "") -> None:
        """Say how this rank ends. The first ending stands: what follows it is its consequence."""
        if self._memory[_HOW]:
            return
        self._write_trace(trace)
        self._write(_ENDING, time.monotonic(), line.encode())
        self._memory[_HOW] = _ENDINGS.index(ending)

    def look(self, stack: str, waits: bool) -> None:
        """Leave a picture of the main thread of a rank that has not ended by itself."""
        if not self._memory[_HOW]:
            self._write_trace(stack)
            self._memory[_WAITS] = waits

    def _write_trace(self, text: str) -> None:
        tail = text.encode()[-(SIZE - TRACE) :]  # the end of a Python stack is the part that tells
        self._memory[TRACE:SIZE] = tail.ljust(SIZE - TRACE, b"\0")

    def _write(self, record: Record, *values: object) -> None:
        offset, layout = record
        layout.pack_into(self._memory, offset, *values)


def read(memory: Memory, rank: int) -> Snapshot:
    """The reader's side."""
    pid, coordinates = _unpack(memory, _IDENTITY)
    place_time, step, phase = _unpack(memory, _PLACE)
    operation_time, operation = _unpack(memory, _OPERATION)
    beat_time, _ = _unpack(memory, _BEAT)
    ending_time, line = _unpack(memory, _ENDING)
    return Snapshot(
        rank=rank,
        pid=pid,
        coordinates=_text(coordinates),
        step=step,
        phase=_text(phase),
        operation=_text(operation),
        place_time=place_time,
        last_sign=max(place_time, operation_time, beat_time),
        ending=ending_of(memory),
        ending_time=ending_time,
        line=_text(line),
        trace=_text(bytes(memory[TRACE:SIZE])),
        waits=bool(memory[_WAITS]),
    )


def beat_of(memory: Memory) -> int:
    return int(_unpack(memory, _BEAT)[1])


def ending_of(memory: Memory) -> Ending:
    return _ENDINGS[memory[_HOW]]


def _unpack(memory: Memory, record: Record) -> tuple[Any, ...]:
    offset, layout = record
    return layout.unpack_from(memory, offset)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


# ---- files and locks -------------------------------------------------------------------------------------------------------


HAVE_LOCKS = fcntl is not None


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file, if nobody else holds its lock, and keep it until it is closed."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass
class StateFile:
    """An open file and its mapping. It may be unlinked: it lives as long as a process holds it."""

    descriptor: int
    memory: mmap = field(repr=False)

    @classmethod
    def create(cls, path: str) -> StateFile:
        """Make the file and take its lock for life. OSError if there is no room."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try_lock(descriptor)
        # Real zeros, not a hole: on a full disk this fails now, where a write to an unbacked page would kill the rank (SIGBUS).
        os.write(descriptor, bytes(SIZE))
        os.lseek(descriptor, TRACE, os.SEEK_SET)  # where faulthandler will write
        return cls(descriptor, mmap(descriptor, SIZE))

    @classmethod
    def open(cls, path: str) -> StateFile:
        """Another rank's file. Its lock belongs to the open file, so this descriptor holds none."""
        descriptor = os.open(path, os.O_RDWR)
        return cls(descriptor, mmap(descriptor, SIZE))

    def owner_lives(self) -> bool:
        if not try_lock(self.descriptor, shared=True):
            return True
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


# One per process, like the flight recorder. It holds a history, never parallel state: nothing is looked up in it.
BOX = BlackBox()
