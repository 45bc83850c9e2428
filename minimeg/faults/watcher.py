"""The watcher: a thread in each rank that sees another fail, tells what happened, and ends the process.

Two facts make it hard. A main thread that waits in C++ runs no Python code, so neither an exception nor a Python signal handler
reaches it. And the one who knows what happened is dead.

* The watcher beats four times a second and looks at its neighbours' black boxes: is a lock free (it died), does one say that it
  failed, is one silent for too long (SIGSTOP)? A suspended laptop does no harm: silence is counted in the watcher's waking time.
* It wakes at once on SIGTERM, by which torchrun tells the survivors: ``signal.set_wakeup_fd`` is served by the C part of the handler.
* It gives the others half a second to write down what they saw; the first to get a lock prints the summary; then the process ends by
  ``os._exit``, since a clean farewell among ranks out of step can hang or abort.

The files lie in a run directory that loses its name as soon as all have opened them: nothing remains, whoever is killed. Without
``fcntl`` (Windows, untested) there is no watcher.

See it run: ``MINIMEG_FAULT=2:3:forward:kill python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import platform
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from minimeg import comm
from minimeg.faults.blackbox import BOX, HAVE_LOCKS, BlackBox, StateFile, beat_of, ending_of, read, try_lock
from minimeg.faults.injection import Fault, armed
from minimeg.faults.postmortem import SILENT, classify, summary
from minimeg.ledger import RECORDER
from minimeg.parallel_state import ParallelState

INTERVAL = 0.25  # seconds between two beats
SETTLE = 0.5  # seconds in which the others find out and write down what they saw
LINGER = 1.0  # seconds in which a survivor waits for the launcher's SIGTERM, so that the launcher sees the first failure first
PATIENCE = 3.0  # seconds that printing may take
GRACE = 5.0  # seconds that Ctrl-C gives the main thread to unwind


@dataclass(eq=False)
class Watcher:
    """The thread that watches, and the one way out of a process whose job has failed."""

    box: BlackBox
    rank: int
    world_size: int
    own: StateFile
    peers: dict[int, StateFile]
    printed: int  # descriptor of the file that holds the summary, once somebody has printed it
    silence: float
    grace: float = GRACE

    def __post_init__(self) -> None:
        self.quiet = dict.fromkeys(self.peers, 0.0)  # seconds of our waking time since the peer's last beat
        self.beats = dict.fromkeys(self.peers, -1)
        self.ending = threading.Lock()  # held by the thread that ends the process
        self.stopping = False
        self.deadline: float | None = None  # Ctrl-C: when patience with the main thread ends
        self.watched = threading.get_ident()
        self.inbox, self.outbox = os.pipe()
        os.set_blocking(self.outbox, False)
        self.thread = threading.Thread(target=self._run, name="minimeg watcher", daemon=True)

    def start(self) -> None:
        self._restore = [self._take_signals(), self._take_crashes()]
        self.thread.start()

    def finish(self) -> None:
        """The good end: let go of everything."""
        self.box.end("done")
        self.stopping = True
        os.write(self.outbox, b"\0")
        self.thread.join()
        for undo in self._restore:
            undo()
        self.box.attach(bytearray(len(self.own.memory)), "")
        for file in (self.own, *self.peers.values()):
            file.close()
        for descriptor in (self.inbox, self.outbox, self.printed):
            os.close(descriptor)

    def fail(self, error: BaseException) -> NoReturn:
        """The main thread has left the watched block by ``error``."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        ending, line = classify(error)
        # Where a run was interrupted may show why it hung; one that ended in order after Ctrl-C says so in its arguments.
        in_order = ending == "signal" and error.args
        self.box.end(ending, line, "" if in_order else "".join(traceback.format_exception(error)))
        if ending == "failed":
            _tell_torchrun(error)
        self._leave(130 if isinstance(error, KeyboardInterrupt) else 1)

    # ---- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        count, before = 0, time.monotonic()
        while not self.stopping:
            self.box.beat(count := count + 1)
            now = time.monotonic()
            # Slept for long ourselves (Ctrl-Z, a closed lid)? Then the others did so too, and it says nothing about them.
            if self._trouble(min(now - before, 2 * INTERVAL)):
                self._leave(1)
            if self.deadline is not None and now > self.deadline:
                self.box.end("signal", "SIGINT (Ctrl-C)")
                self._leave(130)
            before = now
            for number in self._signals(INTERVAL):
                self._on_signal(number)

    def _signals(self, seconds: float) -> bytes:
        """Numbers of the signals that arrive within so many seconds; returns at the first."""
        ready, _, _ = select.select([self.inbox], [], [], seconds)
        return os.read(self.inbox, 64) if ready else b""

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self.box.end("signal", "SIGTERM")
            self._leave(128 + number)
        elif number == signal.SIGINT and self.deadline is None:
            self.deadline = time.monotonic() + self.grace

    def _trouble(self, elapsed: float) -> bool:
        """Has a neighbour failed, died or been silent for too long?"""
        found = False
        for rank, file in self.peers.items():
            dead, beat = not file.owner_lives(), beat_of(file.memory)
            self.quiet[rank] = 0.0 if beat != self.beats[rank] else self.quiet[rank] + elapsed
            self.beats[rank] = beat
            ending = ending_of(file.memory)  # after the lock: who is done writes so, then lets go
            if ending != "done":
                found |= dead or ending in ("failed", "lost", "late") or self.quiet[rank] > self.silence
        return found

    def _leave(self, code: int) -> NoReturn:
        """End this process, after the summary has been printed by somebody."""
        self.ending.acquire()  # for good: a second thread that comes here waits until the process is gone
        self._look_at_main_thread()
        # In threads of their own: a pipe that nobody reads must not hold us up.
        threading.Thread(target=_flush, daemon=True).start()
        time.sleep(SETTLE)
        printer = threading.Thread(target=self._print_once, daemon=True)
        printer.start()
        printer.join(PATIENCE)
        for rank, file in self.peers.items():
            # While the lock is held the process id is still its own.
            if self.quiet[rank] >= SILENT and file.owner_lives():
                with contextlib.suppress(OSError):
                    os.kill(read(file.memory, rank).pid, signal.SIGKILL)
        if ending_of(self.own.memory) in ("running", "lost", "late") and signal.SIGTERM in self._signals(LINGER):
            code = 128 + signal.SIGTERM
        os._exit(code)

    def _look_at_main_thread(self) -> None:
        frame = sys._current_frames().get(self.watched)
        files = [entry.f_code.co_filename for entry, _ in traceback.walk_stack(frame)]
        self.box.look("".join(traceback.format_stack(frame)), comm.__file__ in files)

    def _print_once(self) -> None:
        until = time.monotonic() + PATIENCE / 2
        while not try_lock(self.printed) and time.monotonic() < until:
            time.sleep(0.05)  # one of the others is printing
        if os.fstat(self.printed).st_size:
            return
        ranks = [read(self.own.memory, self.rank)]
        for rank, file in self.peers.items():
            alive = file.owner_lives()  # before the reading, as in _trouble
            ranks.append(replace(read(file.memory, rank), alive=alive, silent=self.quiet[rank]))
        ranks.sort(key=lambda snapshot: snapshot.rank)
        text = summary(ranks, elsewhere=self.world_size - len(ranks)).encode()
        os.write(self.printed, text)
        with contextlib.suppress(OSError):  # stderr is closed: nobody wants to know
            os.write(2, (b"\n" if os.isatty(2) else b"") + text)

    # ---- signals and crashes -----------------------------------------------------------------------------------------------

    def _take_signals(self) -> Callable[[], None]:
        """Have the numbers of signals written into our pipe. Returns how to undo it."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None  # Python allows it to the main thread only; the looks at the neighbours remain
        # Some Python handler must stand, or SIGTERM kills at once; what is to be done, the watcher does.
        handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
        descriptor = signal.set_wakeup_fd(self.outbox, warn_on_full_buffer=False)

        def undo() -> None:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)

        return undo

    def _take_crashes(self) -> Callable[[], None]:
        """Have the Python stack of a crash in C++ written into the black box. Returns how to undo it."""
        if faulthandler.is_enabled():
            return lambda: None
        faulthandler.enable(self.own.descriptor)
        return faulthandler.disable


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout may be broken, closed or None
        sys.stdout.flush()


def _tell_torchrun(error: BaseException) -> None:
    """Write this rank's error file, from which torchrun takes the exception and its time for a report of its own."""
    with contextlib.suppress(OSError):
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().record_exception(error)


# ---- the watch -------------------------------------------------------------------------------------------------------------


@contextmanager
def watch(state: ParallelState, silence: float = 20.0, grace: float = GRACE) -> Iterator[BlackBox]:
    """While the block runs, this rank watches the others of its host and they watch it. Collective; yields the black box.

    If any fails, or an exception leaves the block, this never returns: a summary is printed once, and the process ends with a
    code other than 0. In a single process, and in one that a Python parent manages (the notebook's ranks), only
    MINIMEG_FAULT is armed and exceptions pass.

    Args:
        silence: seconds without a sign of life after which a rank is killed as stopped.
        grace: seconds that Ctrl-C gives the main thread, to unwind or, if it takes the signal itself, to save.
    """
    box, fault = BOX, Fault.from_environment(state.grid.world_size)
    react = armed(box, fault) if fault is not None and fault.rank == state.rank else None
    managed = state.grid.world_size == 1 or not HAVE_LOCKS or multiprocessing.parent_process() is not None
    watcher = None if managed else _open_watcher(box, state, silence, grace)
    RECORDER.observers.append(box.operation)
    if react is not None:
        box.on_enter.append(react)
    try:
        if watcher is not None:
            watcher.start()
        yield box
    except BaseException as error:
        if watcher is None:
            raise
        watcher.fail(error)
    else:
        if react in box.on_enter and fault is not None:
            print(f"minimeg: the run came to its end without {fault}", file=sys.stderr)
        if watcher is not None:
            watcher.finish()
    finally:
        RECORDER.observers.remove(box.operation)
        if react in box.on_enter:
            box.on_enter.remove(react)


def _open_watcher(box: BlackBox, state: ParallelState, silence: float, grace: float) -> Watcher | None:
    """Make this rank's files, open those of the others on this host, and leave no name behind. None if there is no room."""
    token = state.world.all_gather_json(secrets.token_hex(8))[0]
    folder = Path(tempfile.gettempdir()) / f"minimeg-{os.getuid()}-{platform.node()}-{token}"
    own, peers, printed = None, {}, -1
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        own = StateFile.create(str(folder / f"rank-{state.rank}.state"))
    except OSError as error:
        print(f"minimeg: rank {state.rank} is not watched, no black box: {error}", file=sys.stderr)
    state.world.all_gather_json(0)  # every file is there
    if own is not None:
        for path in sorted(folder.glob("rank-*.state")):
            rank = int(path.stem.removeprefix("rank-"))
            if rank != state.rank:
                peers[rank] = StateFile.open(str(path))
        printed = os.open(folder / "summary", os.O_RDWR | os.O_CREAT, 0o600)
    state.world.all_gather_json(0)  # every file is open
    if own is None:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    axes, sizes = state.grid.coordinates(state.rank), state.grid.sizes
    box.attach(own.memory, " ".join(f"{axis}={at}" for axis, at in axes.items() if sizes[axis] > 1))
    return Watcher(box, state.rank, state.grid.world_size, own, peers, printed, silence, grace)
