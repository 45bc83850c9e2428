"""One rank of the pool, seen from inside its process: a main thread that runs what it is told, a control thread that frees it.

A rank that waits for a neighbour which will never come sits in C++ code; no Python exception reaches it there. The control
thread, asleep on a pipe until the parent writes, can still act. It

* tells **where** the main thread is, from ``sys._current_frames()``;
* **frees** it: shutting the sockets of this process makes every blocked gloo operation (collective, send, receive, rendezvous)
  raise "connection closed" within milliseconds, with all variables intact; Python code is interrupted by a signal;
* **ends** the process when the parent is gone, which the closing of the pipe tells.

See it run: ``notebooks/00_start_here.ipynb``; the other side is :mod:`minimeg.lab.ranks`.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import pickle
import signal
import socket
import stat
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from minimeg.lab.report import Failure

# The parent cuts a hang much earlier; this only bounds a wait that nobody watches.
GROUP_TIMEOUT = timedelta(minutes=30)


class Freed(BaseException):
    """Raised in the main thread when another rank has failed. Not an Exception: user code must not swallow it."""


@dataclass(frozen=True)
class Settings:
    """What a worker needs to know to become rank ``rank`` of ``size``."""

    rank: int
    size: int
    parent: int  # process id
    threads: int
    device: str  # "auto" or "cpu"
    environment: dict[str, str]


def main(settings: Settings, tasks: Connection, control: Connection, lifeline: Connection) -> None:
    """Where a new process begins."""
    _die_with_parent(lifeline)
    worker = Worker(settings, tasks, control)
    threading.Thread(target=worker.attend, name="control", daemon=True).start()
    worker.serve()


class Worker:
    """State of one rank: what it is busy with, and the two pipes to the parent."""

    def __init__(self, settings: Settings, tasks: Connection, control: Connection) -> None:
        self.settings, self.tasks, self.control = settings, tasks, control
        self.busy = 0  # the number of the call that the main thread is in; 0: none
        self.freed = 0  # the number of the last call that was freed
        self.main_thread = threading.get_ident()
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
            self.tasks.send_bytes(dumps((number, *self._perform(number, job))))

    def _perform(self, number: int, job: bytes) -> tuple[str, Any]:
        """-> ("done", result bytes), ("failed", Failure) or ("freed", None)."""
        try:
            try:
                self.busy = number
                function, args, kwargs = pickle.loads(job)
                result = function(*args, **kwargs)
                return "done", dumps(result)
            finally:
                self.busy = 0  # from here on _interrupt raises nothing
        except Freed:
            return "freed", None
        except BaseException as error:
            return ("freed", None) if self.freed == number else ("failed", describe(self.settings.rank, error))

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.busy and self.busy == self.freed:
            raise Freed

    # ---- control thread ----------------------------------------------------------------------------------------------------

    def attend(self) -> None:
        while True:
            try:
                if not self.control.poll(1.0):
                    if not _exists(self.settings.parent):  # somebody inherited the other end of the pipe
                        os._exit(1)
                    continue
                question = self.control.recv()
            except (EOFError, OSError):
                os._exit(1)
            if question == "where":
                self.control.send(self.where())
            elif question == "free":
                self.free()
            else:
                os._exit(0)

    def where(self) -> str:
        frame = sys._current_frames().get(self.main_thread)
        if not self.busy or frame is None:
            return "finished"
        return f"waiting at {locate(frame)}"

    def free(self) -> None:
        """Get the main thread out of the present call, wherever it is; answer when that has been set going."""
        number = self.freed = self.busy
        shut_sockets()
        self.control.send("freed")
        deadline = time.monotonic() + 5
        while number and self.busy == number and time.monotonic() < deadline:
            time.sleep(0.05)  # what waited for a neighbour is out of it by now
            if self.busy == number:
                _signal_thread(self.main_thread)


# ---- where is the user's code? ---------------------------------------------------------------------------------------------

_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name))) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_HOUSE = str(Path(__file__).resolve().parent.parent) + os.sep


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen") or filename == __file__


def locate(frame: FrameType | None) -> str:
    """``step.py:12, in forward: x = group.all_reduce(x)``: the innermost line that is the caller's own.

    Neither torch nor the standard library nor, if anything else is found, minimeg itself.
    """
    frames = [(frame, frame.f_lineno)] if frame else []
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        frames.append((frame, frame.f_lineno))
    return _own_line(frames)


def locate_error(trace: TracebackType | None) -> str:
    """The same for an exception's traceback."""
    return _own_line([(frame, line) for frame, line in traceback.walk_tb(trace)][::-1])


def _own_line(frames: list[tuple[FrameType, int]]) -> str:
    """``frames``: innermost first."""
    own = [f for f in frames if not _is_library(f[0].f_code.co_filename)]
    outside = [f for f in own if not f[0].f_code.co_filename.startswith(_HOUSE)]
    chosen = (outside or own or frames)[:1]
    if not chosen:
        return "an unknown line"
    frame, line = chosen[0]
    code = frame.f_code
    name = "" if code.co_name == "<module>" else f", in {code.co_name}"
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return f"{_short(code.co_filename)}:{line}{name}" + (f": {source}" if source else "")


def _short(filename: str) -> str:
    path = Path(filename)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return filename if filename.startswith("<") else path.name


def describe(rank: int, error: BaseException) -> Failure:
    """An exception as something that travels: its traceback as text, without the frames of this file."""
    when = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    original: BaseException | None = error.with_traceback(None)
    try:
        pickle.loads(pickle.dumps(original))
    except Exception:
        original = None
    return Failure(rank, when, type(error).__name__, str(error), text, locate_error(trace), original)


# ---- small things ----------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """By value, without history: a tensor that is part of a graph or lies on a GPU arrives as plain data on the CPU."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and (value.grad_fn is not None or value.is_cuda):
            return value.detach().cpu().requires_grad_(value.requires_grad).__reduce_ex__(2)
        return NotImplemented


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def shut_sockets() -> None:
    """Shut every TCP connection of this process to the loopback: those of gloo and of its rendezvous."""
    folder = Path("/proc/self/fd") if sys.platform == "linux" else Path("/dev/fd")
    if not folder.exists():
        return
    for descriptor in [int(path.name) for path in folder.iterdir()]:
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and "127.0.0.1" in str(copy.getpeername()[0]):
                    copy.shutdown(socket.SHUT_RDWR)


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

    SIGIO, sent by the kernel when a pipe opened for asynchronous input changes, ends a process that does not handle it.
    Nothing is ever written to the pipe, so the only change is its end.
    """
    try:
        import fcntl

        descriptor = lifeline.fileno()
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


# ---- tasks that the parent sends: how ranks find each other ----------------------------------------------------------------

_STORE: list[Any] = []  # the rendezvous of the current groups


def open_store() -> int:
    """Rank 0 opens a new rendezvous on a free port of the loopback. A used one keeps keys of the groups before."""
    from torch._C._distributed_c10d import TCPStore

    leave()
    _STORE[:] = [TCPStore("127.0.0.1", 0, None, True, GROUP_TIMEOUT, wait_for_workers=False)]
    return int(_STORE[0].port)


def join(port: int, device: str) -> None:
    """Enter the process group of all ranks."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank != 0:
        leave()
        _STORE[:] = [TCPStore("127.0.0.1", port, None, False, GROUP_TIMEOUT, wait_for_workers=False)]
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        from minimeg.parallel_state import pick_device

        backend = pick_device(rank, size)[1]
    dist.init_process_group(backend, store=_STORE[0], rank=rank, world_size=size, timeout=GROUP_TIMEOUT)


def leave() -> None:
    """Drop all process groups, broken or not."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _STORE.clear()


def is_joined() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


Function = Callable[..., Any]
