"""One rank of the pool, seen from inside its process: a main thread that runs what it is told, a control thread that frees it.

A rank that waits for a neighbour which will never come sits in C++ code; no Python exception reaches it there. The control
thread, asleep on a pipe until the parent writes, can still act:

* it tells **where** the main thread is, from ``sys._current_frames()``;
* it **frees** the main thread: communication by shutting its connections, Python code by a signal;
* it **ends** the process when the parent is gone, which the closing of the pipe tells.

See it run: ``notebooks/00_start_here.ipynb``; the other side is :mod:`minimeg.lab.ranks`.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, ClassVar

from minimeg.lab import groups
from minimeg.lab.where import describe, locate


class Freed(BaseException):
    """Raised in the main thread when another rank has failed. Not an Exception: user code must not swallow it."""


@dataclass(frozen=True)
class Settings:
    """What a process needs to know to become rank ``rank`` of ``size``."""

    rank: int
    size: int
    parent: int  # process id
    threads: int
    device: str  # "auto" or "cpu"
    environment: dict[str, str]


def main(settings: Settings, tasks: Connection, control: Connection, lifeline: Connection) -> None:
    """Where a new process begins."""
    gc.freeze()  # what the server imported is shared memory: the collector would touch, and so copy, every page of it
    _die_with_parent(lifeline)
    Worker.here = worker = Worker(settings, tasks, control)
    threading.Thread(target=worker.attend, name="control", daemon=True).start()
    worker.serve()


def emit(value: Any) -> None:
    """From inside a call: send ``value`` to the parent at once (see ``Ranks.map``)."""
    assert Worker.here is not None, "only inside a rank"
    Worker.here.send(Worker.here.busy, "output", value)


class Worker:
    """State of one rank: what it is busy with, and the two pipes to the parent."""

    here: ClassVar[Worker | None] = None  # this process's, once it is one

    def __init__(self, settings: Settings, tasks: Connection, control: Connection) -> None:
        self.settings, self.tasks, self.control = settings, tasks, control
        self.busy = 0  # the number of the call that the main thread is in; 0: none
        self.freed = 0  # the number of the last call that was freed
        self.main_thread = threading.get_ident()
        self.sending = threading.RLock()  # threads that user code started may emit, too
        self.mid_message = False
        # A terminal and Jupyter send Ctrl-C to the whole process group. Only the parent decides what it means.
        signal.signal(signal.SIGINT, self._interrupt)
        _set_environment(settings)

    # ---- main thread -------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while True:
            try:
                number, job = self.tasks.recv()
            except (EOFError, OSError):
                os._exit(0)
            kind, value = self._perform(number, job)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self.send(number, kind, value)

    def send(self, number: int, kind: str, value: Any) -> None:
        message = dumps((number, kind, value))
        with self.sending:
            self.mid_message = True  # half a message would garble all that follow
            try:
                self.tasks.send_bytes(message)
            finally:
                self.mid_message = False

    def _perform(self, number: int, job: bytes) -> tuple[str, Any]:
        """-> ("done", (result bytes, still in a group?)), ("failed", Failure) or ("freed", None)."""
        try:
            try:
                self.busy = number
                function, args, kwargs = pickle.loads(job)
                result = dumps(function(*args, **kwargs))
            finally:
                self.busy = 0  # from here on _interrupt raises nothing
        except Freed:
            return "freed", None
        except BaseException as error:
            return ("freed", None) if self.freed == number else ("failed", describe(self.settings.rank, error))
        return "done", (result, _in_a_group())

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.busy and self.busy == self.freed and not self.mid_message:
            raise Freed

    # ---- control thread ----------------------------------------------------------------------------------------------------

    def attend(self) -> None:
        while True:
            try:
                if not self.control.poll(1.0):
                    if not _exists(self.settings.parent):  # another process has inherited the far end of the pipe
                        os._exit(1)
                    continue
                question = self.control.recv()
                if question == "where":
                    self.control.send(self.where())
                elif question == "free":
                    self.free()
                else:
                    os._exit(0)
            except (EOFError, OSError):
                os._exit(1)

    def where(self) -> str:
        """Where the main thread waits; while it still runs, look again for up to a second."""
        look, calm, deadline = self._look(), 0, time.monotonic() + 1
        while look is not None:
            time.sleep(0.05)
            before, look = look, self._look()
            calm = calm + 1 if look == before else 0
            if look is not None and calm == 2:  # twice, since on a busy machine a thread may get no turn for a while
                return f"waiting at {look[0]}"
            if look is not None and time.monotonic() > deadline:
                return f"running {look[0]}"
        return "finished"

    def _look(self) -> tuple[str, float] | None:
        """The line, and the processor time that the main thread has used: equal twice means that it waits."""
        frame = sys._current_frames().get(self.main_thread)
        if not self.busy or frame is None:
            return None
        used = 0.0
        if hasattr(time, "pthread_getcpuclockid"):
            used = time.clock_gettime(time.pthread_getcpuclockid(self.main_thread))
        return locate(frame), used

    def free(self) -> None:
        """Get the main thread out of the present call, wherever it is; answer when that has been set going."""
        number = self.freed = self.busy
        groups.unblock()
        self.control.send("freed")
        deadline = time.monotonic() + 5
        while number and self.busy == number and time.monotonic() < deadline:
            time.sleep(0.05)  # what waited for a neighbour is out of it by now
            if self.busy == number:
                _signal_thread(self.main_thread)


class _Pickler(pickle.Pickler):
    """A tensor that is part of a graph, or lies on a GPU, arrives as plain data on the CPU."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and (value.grad_fn is not None or value.is_cuda):
            return value.detach().cpu().__reduce_ex__(2)
        return NotImplemented


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


# ---- the process and its parent --------------------------------------------------------------------------------------------


def _in_a_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized()


def _signal_thread(identity: int) -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(identity, signal.SIGINT)  # also ends a sleep
    else:
        signal.raise_signal(signal.SIGINT)


def _exists(process: int) -> bool:
    if os.name == "nt":
        return True  # os.kill would end it; there the closed pipe must do
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _die_with_parent(lifeline: Connection) -> None:
    """Let the kernel end this process when the parent's end of ``lifeline`` closes, even if no Python code can run here.

    SIGIO, which the kernel sends when a pipe opened for asynchronous input changes, ends a process that does not handle it.
    Nothing is ever written to the pipe, so the only change is its end.
    """
    try:
        import fcntl

        descriptor = lifeline.fileno()
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    except (ImportError, AttributeError, OSError):
        pass  # the control thread notices too


def _set_environment(settings: Settings) -> None:
    """The variables torchrun would set, and its thread count: cores shared out among the ranks."""
    os.environ.clear()
    os.environ.update(settings.environment)
    os.environ.update(
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        WORLD_SIZE=str(settings.size),
        LOCAL_WORLD_SIZE=str(settings.size),
        OMP_NUM_THREADS=str(settings.threads),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(settings.threads)
