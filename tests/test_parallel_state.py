"""From the grid to the groups: made by everybody in one order, only those that are needed; devices, timeouts, threads."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import subprocess
import sys
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimeg import parallel_state
from minimeg.comm import Group
from minimeg.grid import Grid
from minimeg.lab.processes import threads_per_rank
from minimeg.parallel_state import (
    AXES,
    ParallelState,
    initialize_model_parallel,
    pick_device,
    single_process,
    world_size_of_environment,
)

ROOT = Path(__file__).parent.parent
ATTRIBUTES = [*AXES, "world", "embedding"]

# ---- CASE 02: every rank makes every group -----------------------------------------------------------------------------------


def made_on_this_rank(t: int, p: int, c: int, order: str) -> dict[str, Any]:
    """Wrap torch's new_group while the groups are made, and use each of them once."""
    calls: list[tuple[list[int], float]] = []
    original = dist.new_group

    def spy(ranks: list[int], timeout: timedelta, backend: str) -> Any:
        calls.append((ranks, timeout.total_seconds()))
        return original(ranks, timeout=timeout, backend=backend)

    dist.new_group = spy
    try:
        state = initialize_model_parallel(t, p, c, order, timeout_seconds=17)
    finally:
        dist.new_group = original
    groups = {name: getattr(state, name) for name in ATTRIBUTES}
    members = {name: group and group.all_gather(torch.tensor([state.rank])).tolist() for name, group in groups.items()}
    position = {name: group and group.ranks[group.rank] for name, group in groups.items()}
    names = {name: group and group.name for name, group in groups.items()}
    state.destroy()
    return {
        "calls": calls,
        "members": members,
        "position": position,
        "names": names,
        "coordinates": state.tp.coordinates,
    }


@pytest.mark.parametrize(
    ("t", "p", "c", "order"),
    [
        (1, 1, 1, "tp-cp-ep-dp-pp"),
        (2, 1, 1, "tp-cp-ep-dp-pp"),
        (2, 2, 1, "tp-cp-ep-dp-pp"),
        (1, 2, 2, "pp-dp-cp-tp"),
        (1, 4, 1, "tp-cp-ep-dp-pp"),
        (4, 1, 1, "dp-tp"),
    ],
)
def test_every_rank_makes_the_same_groups_in_the_same_order(ranks: Any, t: int, p: int, c: int, order: str) -> None:
    """CASE 02: gloo accepts a group that only its members make, so only a record of the calls shows the mistake."""
    grid = Grid(4, tp=t, pp=p, cp=c, order=order)
    seen = ranks(4, made_on_this_rank, t, p, c, order)
    calls = [made for made, _ in seen[0]["calls"]]
    assert [one["calls"] for one in seen] == [seen[0]["calls"]] * 4
    assert {timeout for _, timeout in seen[0]["calls"]} == {17}
    assert all(made == sorted(made) and len(made) > 1 for made in calls)
    assert sorted(map(tuple, calls)) == sorted(needed(grid)), "each group that is needed, once, and no other"
    for rank, one in enumerate(seen):
        for name in AXES:
            [mine] = [group for group in grid.groups(AXES[name]) if rank in group]
            assert one["members"][name] == mine, "the group reaches its members in rank order"
            assert one["names"][name] == AXES[name]
        [pipeline] = [group for group in grid.groups("pp") if rank in group]
        ends = sorted({pipeline[0], pipeline[-1]})
        assert one["members"]["embedding"] == (ends if rank in ends else None)
        assert one["members"]["world"] == [0, 1, 2, 3]
        assert set(one["position"].values()) - {None} == {rank}
        at = grid.coordinates(rank)
        assert one["coordinates"] == " ".join(f"{axis}={at[axis]}" for axis in grid.sizes if grid.sizes[axis] > 1)


def needed(grid: Grid, world_is_there: bool = False) -> set[tuple[int, ...]]:
    found = {tuple(group) for axes in AXES.values() for group in grid.groups(axes)}
    found |= {tuple(group) for group in grid.embedding_groups()}
    everyone = tuple(range(grid.world_size))
    found |= {everyone}
    return {group for group in found if len(group) > 1} - ({everyone} if world_is_there else set())


class FakeTorch:
    """Stands in for torch.distributed: one rank of a large world, and what groups it makes."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.made: list[list[int]] = []
        self.destroyed: list[Any] = []
        self.is_initialized = lambda: True
        self.get_world_size = lambda: world_size
        self.get_rank = lambda: rank
        self.get_backend = lambda: "gloo"
        self.group = SimpleNamespace(WORLD="the world of somebody else")
        self.destroy_process_group = self.destroyed.append

    def new_group(self, ranks: list[int], timeout: timedelta, backend: str) -> str:
        self.made.append(ranks)
        return f"group {ranks}"


@pytest.mark.parametrize(
    ("world", "t", "p", "c", "order"),
    [
        (16, 2, 4, 1, "tp-cp-ep-dp-pp"),
        (16, 2, 2, 2, "tp-cp-ep-pp-dp"),
        (24, 3, 2, 1, "pp-tp-dp"),
        (32, 2, 4, 2, "dp-cp-pp-tp"),
        (64, 4, 4, 1, "tp-dp-pp"),
    ],
)
def test_large_worlds_make_the_same_groups(
    monkeypatch: pytest.MonkeyPatch, world: int, t: int, p: int, c: int, order: str
) -> None:
    """CASE 02, on more ranks than a laptop has."""
    grid, sequences = Grid(world, tp=t, pp=p, cp=c, order=order), []
    monkeypatch.setattr(parallel_state, "_message_store", lambda backend, timeout: None)
    for rank in range(world):
        fake = FakeTorch(rank, world)
        monkeypatch.setattr(parallel_state, "dist", fake)
        state = initialize_model_parallel(t, p, c, order)
        sequences.append(fake.made)
        for name in ATTRIBUTES:
            group = getattr(state, name)
            if group is not None and group.size > 1:
                assert group.handle == f"group {list(group.ranks)}"
                assert group.ranks[group.rank] == rank
        assert state.tp.size * state.dp_cp.size * state.pp.size == world
        handles = {g.handle for name in ATTRIBUTES if (g := getattr(state, name)) is not None} - {None}
        state.destroy()
        assert sorted(fake.destroyed) == sorted(handles), "each group once"
    assert sequences == [sequences[0]] * world
    assert sorted(map(tuple, sequences[0])) == sorted(needed(grid))


# ---- states ------------------------------------------------------------------------------------------------------------------


def states_one_after_another() -> list[float]:
    """More states in turn than a rank could leave open by mistake; the pool's own group outlives them."""
    sums = []
    for t, p in ((2, 1), (1, 2), (2, 1)):
        with initialize_model_parallel(t, p) as state:
            sums.append((state.tp if t == 2 else state.pp).all_reduce(torch.tensor(1.0)).item())
            inside = len(dist.distributed_c10d._world.pg_map)
        assert len(dist.distributed_c10d._world.pg_map) < inside
        with pytest.raises(ValueError, match=r"tp \[0, 1\] has no process group" if t == 2 else "pp"):
            (state.tp if t == 2 else state.pp).all_reduce(torch.tensor(1.0))  # torch would take the group of all ranks
        state.destroy()  # again: nothing left
    dist.barrier()
    with pytest.raises(ZeroDivisionError), initialize_model_parallel(2) as state:
        1 / 0  # noqa: B018
    sums.append(state.tp.all_reduce(torch.tensor(3.0)).item())  # an error leaves the groups alone
    state.destroy()
    return sums


def test_a_state_frees_its_groups_at_the_end_of_with(ranks: Any) -> None:
    assert ranks(2, states_one_after_another) == [[2, 2, 2, 6]] * 2


def test_single_process_is_a_whole_world() -> None:
    state = single_process()
    assert {f.name for f in fields(ParallelState)} == {*ATTRIBUTES, "grid", "rank", "device"}
    for name in ATTRIBUTES:
        group: Group = getattr(state, name)
        assert (group.ranks, group.rank, group.size, group.handle) == ((0,), 0, 1, None)
        assert group.name == AXES.get(name, name)
    assert (state.rank, state.device, state.grid) == (0, torch.device("cpu"), Grid(1))
    state.destroy()
    assert single_process("meta").device.type == "meta"


def test_one_process_starts_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    assert world_size_of_environment() == 1
    try:
        state = initialize_model_parallel(device="cpu")
        assert dist.get_world_size() == 1
        assert (state.world.size, state.rank, state.embedding.size) == (1, 0, 1)
        assert state.dp.all_reduce(torch.tensor(5)).item() == 5
        state.destroy()
    finally:
        dist.destroy_process_group()


def show(name: str) -> list[str]:
    """What a demo prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module(f"minimeg.demos.{name}", run_name="__main__")
    return out.getvalue().splitlines()


def test_demos(ranks: Any) -> None:
    for name, n in (("groups", 4), ("f_and_g", 4), ("linears", 2), ("pipeline", 4)):
        lines, *others = ranks(n, show, name)
        assert others == [[]] * (n - 1), "one rank speaks for all"
        if name == "groups":
            assert [line.split("  ")[0] for line in lines if line.startswith("rank")] == [f"rank {r}" for r in range(4)]
            assert sum("sum of (rank + 1) = 7" in line for line in lines) == 2
            assert "    stage 1 heard 10 from stage 0" in lines
        if name == "f_and_g":
            for rank in range(4):
                right, wrong = "y 10   x.grad 10   w.grad 1", f"y 10   x.grad {rank + 1}    w.grad 1"
                assert f"rank {rank}     {right}      {wrong}" in lines
        if name == "linears":
            assert lines.count("    sum + bias    [[5.0, 103.0], [9.0, 111.0]]") == 2
            assert "one process       [[5.0, 103.0], [9.0, 111.0]]" in lines
        if name == "pipeline":
            assert lines[0].endswith("= 504")  # 4! * 21
            assert [line.split()[3] for line in lines[1:]] == ["504", "252", "168", "126"]
            assert [line.split()[5] for line in lines[1:]] == ["4", "3", "2", "1"], "1F1B: p - r in flight"
            assert [line.split()[7] for line in lines[1:]] == ["6", "12", "12", "6"]
            assert lines[4].endswith("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 F0.4 B0.4 F0.5 B0.5")


def test_a_script_that_just_ends_ends_cleanly() -> None:
    """Under torchrun, without destroying the default group. Five of six runs of this one used to abort at their end: a gloo thread
    freed its last tensor when Python was finishing."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "minimeg.demos.f_and_g"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "rank 3     y 10   x.grad 10   w.grad 1" in ended.stdout


# ---- refusals, before anything exists ----------------------------------------------------------------------------------------


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process group was about to be made")

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(dist, "new_group", fail)


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({"WORLD_SIZE": "6"}, {"tensor_model_parallel_size": 4}, ["world_size=6", "tp=4", "tp=1, 2, 3 or 6"]),
        ({"WORLD_SIZE": "8"}, {"order": "tp-dp-tp"}, ["order='tp-dp-tp'", "'tp' more than once", "'tp-dp'"]),
        ({"WORLD_SIZE": "8"}, {"context_parallel_size": 0}, ["cp=0", "at least 1"]),
        (
            {"WORLD_SIZE": "8"},
            {"pipeline_model_parallel_size": 3, "order": "pp-xp"},
            ["pp=3", "'xp'", "pp=1, 2, 4 or 8"],
        ),
        ({}, {"timeout_seconds": 0}, ["timeout_seconds", "0"]),
        ({}, {"timeout_seconds": float("nan")}, ["timeout_seconds", "nan"]),
        ({}, {"timeout_seconds": float("inf")}, ["timeout_seconds", "inf"]),
        ({}, {"device": "gpu"}, ['"auto", "cpu" or "cuda"', "'gpu'"]),
        ({"WORLD_SIZE": "many"}, {}, ["WORLD_SIZE", "'many'"]),
        (
            {"WORLD_SIZE": "6"},
            {"tensor_model_parallel_size": 4, "timeout_seconds": -1},
            ["tp=4", "timeout_seconds", "-1"],
        ),
    ],
)
def test_a_bad_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch, no_groups: None, environment: dict[str, str], arguments: Any, words: list[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        initialize_model_parallel(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_world_without_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 but RANK is not set: .*torch\.distributed\.run"):
        initialize_model_parallel(device="cpu")
    assert not dist.is_initialized()


def test_no_rendezvous_names_host_port_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))  # bound, but nobody listens
        port = busy.getsockname()[1]
        for name, value in {
            "WORLD_SIZE": "2",
            "RANK": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConnectionError, match=rf"no rendezvous at 127\.0\.0\.1:{port} within 1 s .*--standalone"):
            initialize_model_parallel(timeout_seconds=1, device="cpu")
    assert not dist.is_initialized()


# ---- devices -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_world_size", "asked", "expected"),
    [
        (0, 1, 4, "auto", ("cpu", "gloo", False)),
        (4, 1, 4, "auto", ("cuda:1", "nccl", False)),
        (8, 3, 4, "cuda", ("cuda:3", "nccl", False)),
        (1, 3, 4, "auto", ("cuda:0", "gloo", True)),
        (2, 3, 4, "cuda", ("cuda:1", "gloo", True)),
        (4, 1, 4, "cpu", ("cpu", "gloo", False)),
    ],
)
def test_one_gpu_a_rank_or_gloo(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int, local_world_size: int, asked: str, expected: Any
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device, backend, staged = pick_device(local_rank, local_world_size, asked)
    assert (str(device), backend, staged) == expected
    assert [str(one) for one in chosen] == ([expected[0]] if "cuda" in expected[0] else [])


def test_sharing_a_gpu_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.warns(UserWarning, match=r"4 ranks share 1 GPU\(s\): gloo, staged through host memory"):
        pick_device(0, 4)
    pick_device(1, 4)  # filterwarnings = error: the other ranks say nothing


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match='device="cuda": this machine has no usable GPU; use device="cpu"'):
        pick_device(0, 1, "cuda")


# ---- CASE 48: threads --------------------------------------------------------------------------------------------------------


def threads_here() -> tuple[int, int]:
    return torch.get_num_threads(), int(os.environ["LOCAL_WORLD_SIZE"])


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_share_out_the_cores(ranks: Any, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """CASE 48: n ranks with as many threads as cores each slow each other down."""
    cores = len(os.sched_getaffinity(0))
    for threads, local_world_size in ranks(n, threads_here):
        assert local_world_size == n
        assert threads == 1 or threads * n <= cores
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for available, each in ((1, 1), (2, 1), (8, 8 // n), (9, 9 // n)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, k=available: set(range(k)))
        monkeypatch.setattr(os, "cpu_count", lambda k=available: k)
        assert threads_per_rank(n) == each
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(n) == 3, "the user's value is kept"


def test_the_training_program_shares_out_the_cores_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASE 48: the same under torchrun as in a notebook."""
    from minimeg import train

    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    train._limit_threads()
    assert chosen == [], "the user's value is kept"
    monkeypatch.delenv("OMP_NUM_THREADS")
    train._limit_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    train._limit_threads()
    assert chosen == [2, 1]
