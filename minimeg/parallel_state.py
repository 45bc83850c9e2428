"""From the grid to this process's groups: the one place where devices, backends and process groups are made.

Megatron-LM keeps its groups in module globals behind some eighty getters. Here ``initialize_model_parallel`` returns one
:class:`ParallelState`, and whoever needs a group is handed it: ``state.tp``, ``state.pp``, ... (the docs' dictionary page maps
each of Megatron's getters to ours).

The rule that everything rests on (pytorch issue 25390): **every process makes every group, in the same order**, also those it is
not in. gloo forgives a mistake here and NCCL hangs, so a test records the sequence.

See it run: ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.groups``.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from minimeg.comm import Group
from minimeg.grid import Grid
from minimeg.ledger import RECORDER

# Only for the farewell at the end of the process; nothing is looked up in it.
_STATES: weakref.WeakSet[ParallelState] = weakref.WeakSet()

# The axes for which groups are made, in this order, and the attribute of ParallelState that holds each.
AXES = {"tp": "tp", "cp": "cp", "dp": "dp", "dp_cp": "dp-cp", "pp": "pp", "mp": "tp-pp"}


@dataclass(frozen=True, eq=False)
class ParallelState:
    """This process's place in the grid and the groups it belongs to. ``with`` frees the groups at the end.

    ``mp`` is the model-parallel group (tp x pp): the ranks that together hold one copy of the model. ``embedding`` joins the
    first and the last pipeline stage, which both hold a tied word embedding; None on the stages between.
    """

    grid: Grid
    rank: int
    device: torch.device
    world: Group
    tp: Group
    cp: Group
    dp: Group
    dp_cp: Group
    pp: Group
    mp: Group
    embedding: Group | None

    def destroy(self) -> None:
        """Free the process groups made here (not the default one). Every rank must call it; the Groups are of no use then."""
        handles = {id(handle): handle for handle in self._let_go() if handle is not dist.group.WORLD}
        for handle in handles.values():
            dist.destroy_process_group(handle)

    def _let_go(self) -> list[dist.ProcessGroup]:
        """Take the connections from the Groups: a process group ends its threads once nobody holds it."""
        groups = [self.world, self.tp, self.cp, self.dp, self.dp_cp, self.pp, self.mp, self.embedding]
        handles = [group.handle for group in groups if group is not None and group.handle is not None]
        for group in groups:
            if group is not None:
                group.handle = None
        return handles

    def __enter__(self) -> ParallelState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error the ranks are out of step: a clean farewell could hang
            self.destroy()


def pick_device(local_rank: int, local_world_size: int, device: str = "auto") -> tuple[torch.device, str, bool]:
    """The only place that says "cuda": -> (device, backend, stage through host memory).

    A GPU for each rank of this machine: NCCL. Fewer: ranks share GPUs, talk over gloo and stage through host memory, since NCCL
    refuses two ranks on one GPU. None: the CPU and gloo.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device must be "auto", "cpu" or "cuda", got {device!r}')
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if gpus == 0:
        if device == "cuda":
            raise ValueError('device="cuda": this machine has no usable GPU; use device="cpu" or "auto"')
        return torch.device("cpu"), "gloo", False
    chosen = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(chosen)
    if gpus >= local_world_size:
        return chosen, "nccl", False
    if local_rank == 0:
        warnings.warn(f"{local_world_size} ranks share {gpus} GPU(s): gloo, staged through host memory", stacklevel=3)
    return chosen, "gloo", True


_LAUNCH = "start with python -m torch.distributed.run --nproc-per-node N ..., or unset WORLD_SIZE for a single process"


def _environment(name: str, default: int | None) -> int:
    value = os.environ.get(name)
    if value is None and default is None:
        raise ValueError(f"WORLD_SIZE={os.environ.get('WORLD_SIZE', 1)} but {name} is not set: {_LAUNCH}")
    try:
        return int(value) if value is not None else int(default or 0)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {value!r}") from None


def world_size_of_environment() -> int:
    """Number of processes: of the initialised torch.distributed, else of torchrun's environment, else 1."""
    return dist.get_world_size() if dist.is_initialized() else _environment("WORLD_SIZE", 1)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    order: str = "tp-cp-ep-dp-pp",
    backend: str | None = None,
    timeout_seconds: float = 60,
    device: str = "auto",
) -> ParallelState:
    """Check the layout, start torch.distributed if nobody has, make the groups, and say where this process stands.

    The data-parallel size is what remains: world / (t p c). Every wait in these groups ends after ``timeout_seconds``.

    Raises:
        ValueError: before any process group exists, with all faults of the layout and a legal alternative.
    """
    t, p, c = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    faults = []
    try:
        grid = Grid(world_size_of_environment(), tp=t, cp=c, pp=p, order=order)
    except ValueError as error:
        faults.append(str(error))
    if not 0 < timeout_seconds < float("inf"):
        faults.append(f"timeout_seconds={timeout_seconds} must be a positive number of seconds, e.g. 60")
    if faults:
        raise ValueError("\n".join(faults))
    local_world_size = _environment("LOCAL_WORLD_SIZE", grid.world_size)
    place, natural_backend, stage = pick_device(_environment("LOCAL_RANK", 0), local_world_size, device)
    timeout = timedelta(seconds=timeout_seconds)
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    if not dist.is_initialized():
        _start(grid.world_size, backend or natural_backend, timeout)
        made[tuple(range(grid.world_size))] = dist.group.WORLD  # one that somebody else started has another timeout
    rank = dist.get_rank()
    used_backend = backend or dist.get_backend()
    stage = place.type == "cuda" and "nccl" not in used_backend
    duplex = "nccl" not in used_backend
    store = _message_store(used_backend, timeout)
    coordinates = " ".join(f"{axis}={at}" for axis, at in grid.coordinates(rank).items() if grid.sizes[axis] > 1)

    def mine(name: str, partition: list[list[int]]) -> Group | None:
        found = None
        for ranks in map(tuple, partition):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=timeout, backend=used_backend)
            if rank in ranks:
                handle = made.get(ranks) if len(ranks) > 1 else None
                found = Group(ranks, ranks.index(rank), name, handle, stage, coordinates, duplex, store)
        return found

    groups = {attribute: _present(mine(name, grid.groups(name))) for attribute, name in AXES.items()}
    world = _present(mine("world", [list(range(grid.world_size))]))
    embedding = mine("embedding", grid.embedding_groups())
    state = ParallelState(grid=grid, rank=rank, device=place, world=world, embedding=embedding, **groups)
    _STATES.add(state)
    return state


def single_process(device: torch.device | str = "cpu") -> ParallelState:
    """A world of one rank, beside whatever else this process belongs to: every group has one member and communicates nothing."""

    def alone(name: str) -> Group:
        return Group((0,), 0, name)

    groups = {attribute: alone(name) for attribute, name in AXES.items()}
    return ParallelState(
        grid=Grid(1), rank=0, device=torch.device(device), world=alone("world"), embedding=alone("embedding"), **groups
    )


def _present(group: Group | None) -> Group:
    assert group is not None, "the groups of an axis cover every rank"
    return group


def _start(world_size: int, backend: str, timeout: timedelta) -> None:
    atexit.register(_say_goodbye)
    if world_size == 1 and "MASTER_ADDR" not in os.environ:
        # A single process needs no rendezvous, and so no free port.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank = _environment("RANK", None)
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} must lie in 0..{world_size - 1}, since WORLD_SIZE={world_size}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE={world_size}, but {' and '.join(missing)} not set; {_LAUNCH}")
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps one store over its restarts: what a former attempt left there must not be taken for this one's.
        attempt = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ConnectionError(
            f"no rendezvous at {address}:{port} within {timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}); "
            "is the port busy? On one machine, torchrun --standalone picks a free one"
        ) from error


def _say_goodbye() -> None:
    """End gloo's threads before the interpreter. One that frees its last tensor while Python is finishing wants the interpreter's
    lock, does not get it, and aborts the process ("terminate called without an active exception", exit code -6).

    Not after an error or amid an operation: then a thread may wait for a rank that will never come, and would be waited for.
    """
    in_order = not hasattr(sys, "last_type") and all(entry.seconds is not None for entry in RECORDER.entries)
    if in_order and dist.is_initialized() and "gloo" in dist.get_backend():
        for state in list(_STATES):
            state._let_go()
        dist.destroy_process_group()


def _message_store(backend: str, timeout: timedelta) -> Store | None:
    """The rendezvous' TCPStore, by which gloo's messages are checked (NCCL reports unequal sizes itself)."""
    store = _get_default_store()
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if backend != "gloo" or not isinstance(base, TCPStore):
        return None
    store.set_timeout(timeout)
    return store
