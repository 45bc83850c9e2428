"""How ranks find each other, how a blocked one is freed, and how its groups come back: what happens inside each worker.

After an error the old process groups are useless: their connections are shut. A notebook, however, still holds them, in the
``Group`` objects of a ``ParallelState`` or in a plain variable. So each rank remembers which groups it was in, all of them are
formed again over a new rendezvous, in the order in which they were first made, and every object that held an old handle is
given the new one.

See it run: the deadlock cell of ``notebooks/00_start_here.ipynb``, and the cell after it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

# The parent cuts a hang much earlier; this only bounds a wait that nobody watches.
GROUP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, order=True)
class Membership:
    """A process group by what all its members know of it."""

    number: int  # torch counts the groups of a process; ranks that make the same groups count alike
    ranks: tuple[int, ...]
    backend: str
    timeout: float  # seconds


@dataclass
class _State:
    store: Any = None  # the rendezvous of the present groups
    device: Any = None  # of this rank, as parallel_state picks it
    world: Any = None  # the old default group's handle
    handles: dict[Membership, Any] = field(default_factory=dict)  # old handles of the other groups


_STATE = _State()


# ---- tasks that the parent sends -------------------------------------------------------------------------------------------


def leave(keep: bool) -> tuple[int, list[Membership]]:
    """Drop all process groups, broken or not -> (port of a new rendezvous, on rank 0; the groups to form again).

    ``keep``: remember the groups, so that :func:`join` can bring them back.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    if keep:
        remember()
    else:
        _STATE.world, _STATE.handles = None, {}
    if dist.is_initialized():
        dist.destroy_process_group()
    _STATE.store = None
    if os.environ["RANK"] != "0":
        return 0, list(_STATE.handles)
    # A new one each time, on a free port of the loopback: a used one keeps the keys of the groups before.
    _STATE.store = TCPStore("127.0.0.1", 0, None, True, GROUP_TIMEOUT, wait_for_workers=False)
    return int(_STATE.store.port), list(_STATE.handles)


def join(port: int, device: str, again: list[Membership]) -> None:
    """Enter the process group of all ranks, then form the groups in ``again``, the same list on every rank."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from minimeg.parallel_state import pick_device

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank != 0:
        _STATE.store = TCPStore("127.0.0.1", port, None, False, GROUP_TIMEOUT, wait_for_workers=False)
    _STATE.device, backend, _ = pick_device(rank, size, device)
    dist.init_process_group(backend, store=_STATE.store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # as torchrun sets them
    swaps = {id(_STATE.world): dist.group.WORLD} if _STATE.world is not None else {}
    for group in again:
        handle = dist.new_group(list(group.ranks), timedelta(seconds=group.timeout), group.backend)
        if group in _STATE.handles:
            swaps[id(_STATE.handles[group])] = handle
    _swap_handles(swaps)
    _STATE.world, _STATE.handles = None, {}


def device() -> Any:
    """The torch.device of this rank."""
    return _STATE.device


def agreed(memories: list[list[Membership]]) -> list[Membership]:
    """Of what each rank remembers: the groups that all their members know, in the order in which they were made.

    A rank that failed half-way through making groups may know one that its partner never heard of.
    """
    every = {group for memory in memories for group in memory}
    return sorted(group for group in every if all(group in memories[rank] for rank in group.ranks))


# ---- before leaving --------------------------------------------------------------------------------------------------------


def remember() -> None:
    """Note the groups that this process is in. Keeps an earlier memory if there are none."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    if not dist.is_initialized():
        return
    _STATE.world, _STATE.handles = dist.group.WORLD, {}
    for handle, name in _world.pg_names.items():
        if handle is not _STATE.world and name.isdigit():  # others were made by their members alone
            ranks = tuple(dist.get_process_group_ranks(handle))
            group = Membership(int(name), ranks, dist.get_backend(handle), _timeout_of(handle))
            _STATE.handles[group] = handle


def _timeout_of(handle: Any) -> float:
    for device in handle._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            return float(handle._get_backend(device).options._timeout.total_seconds())
    return GROUP_TIMEOUT.total_seconds()


def _swap_handles(swaps: dict[int, Any]) -> None:
    """Put the new handle wherever the garbage collector sees an old one: in a ``Group``, a variable, a list, an attribute."""
    from torch.distributed.distributed_c10d import _get_default_store

    from minimeg.comm import Group

    if not swaps:
        return
    # By hand, since the collector does not look into a dictionary, such as a Group's, that can be part of no cycle.
    for group in [thing for thing in gc.get_objects() if type(thing) is Group]:
        group.handle = swaps.get(id(group.handle), group.handle)
        if group.store is not None:
            old_store: Any = group.store
            group.store = _get_default_store()
            group.store.set_timeout(old_store.timeout)
    old = [handle for handle in (_STATE.world, *_STATE.handles.values()) if id(handle) in swaps]
    for holder in gc.get_referrers(*old):
        if holder is _STATE.handles or holder is vars(_STATE) or holder is old:
            continue
        if isinstance(holder, dict):
            holder.update({key: swaps[id(value)] for key, value in list(holder.items()) if id(value) in swaps})
        elif isinstance(holder, list):
            holder[:] = [swaps.get(id(value), value) for value in holder]
        elif hasattr(holder, "__dict__"):
            for name, value in list(vars(holder).items()):
                if id(value) in swaps:
                    setattr(holder, name, swaps[id(value)])


# ---- from the control thread -----------------------------------------------------------------------------------------------


def unblock() -> None:
    """Make every communication that this process waits in raise an error.

    gloo and its rendezvous talk over TCP, and a shut connection wakes whoever waits on it: collectives, sends, receives,
    look-ups. Variables stay. NCCL, which does not, is told to abort (not tried).
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and "nccl" in dist.get_backend():
        from torch.distributed.distributed_c10d import _abort_process_group

        remember()
        _abort_process_group()
    shut_sockets()


def shut_sockets() -> None:
    """Shut every TCP connection of this process over the loopback.

    Windows cannot list a process's sockets: there a rank that waits for another is not freed but, after a while, replaced.
    """
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    for descriptor in [int(path.name) for path in folder.iterdir()] if folder.exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and "127.0.0.1" in str(copy.getpeername()[0]):
                    copy.shutdown(socket.SHUT_RDWR)
