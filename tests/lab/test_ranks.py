"""The pool of ranks: results in order, the right rank blamed, hangs cut, groups formed again, nothing left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minimeg.lab.groups import Membership, agreed
from minimeg.lab.processes import threads_per_rank
from minimeg.lab.ranks import RankError, Ranks
from minimeg.lab.report import Failure, Story, exit_reason, spans, where_table

ROOT = Path(__file__).parent.parent.parent
KEPT: dict[str, object] = {}  # on a rank: what stays between calls

# ---- what runs on the ranks --------------------------------------------------------------------------------------------------


def total(add: float = 0.0) -> float:
    x = torch.tensor([dist.get_rank() + 1.0 + add])
    dist.all_reduce(x)
    return x.item()


def fail_on(rank: int, message: str = "boom") -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"{message} on {rank}")
    total()


def fail_everywhere() -> None:
    raise ValueError("the same mistake")


def skip_on(rank: int, operation: str) -> None:
    """Every rank but one takes part; with "recv" and "send" only one does."""
    me, x = dist.get_rank(), torch.zeros(4)
    if operation == "all_reduce" and me != rank:
        dist.all_reduce(x)
    if operation == "barrier" and me != rank:
        dist.barrier()
    if operation == "new_group" and me != rank:
        dist.new_group()
    if operation == "recv" and me == rank:
        dist.recv(x, (me + 1) % dist.get_world_size())
    if operation == "send" and me == rank:
        dist.send(x, (me + 1) % dist.get_world_size())
    if operation == "irecv" and me == rank:
        dist.irecv(x, (me + 1) % dist.get_world_size()).wait()
    if operation == "sleep" and me == rank:
        time.sleep(1000)
    if operation == "loop" and me == rank:
        while True:
            pass
    if operation == "swallow" and me == rank:
        while True:
            try:
                time.sleep(1000)
            except Exception:  # what would be a mistake anywhere must not defeat the cut either
                continue


def hold_the_interpreter(rank: int) -> None:
    if dist.get_rank() == rank:
        ctypes.PyDLL(None).sleep(1000)  # native code that keeps the lock: no Python thread of this process can run
    total()


def end_process(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    total()


def keep(**values: object) -> None:
    KEPT.update(values)


def kept(name: str) -> object:
    return KEPT.get(name)


def environment() -> dict[str, str]:
    return dict(os.environ) | {"threads": str(torch.get_num_threads()), "parent": str(os.getppid())}


def make_pairs() -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    from minimeg.comm import Group

    rank, ranks = dist.get_rank(), (0, 1) if dist.get_rank() < 2 else (2, 3)
    handles = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = handles[rank // 2]
    store = _get_default_store()
    KEPT.update(plain=mine, group=Group(ranks, ranks.index(rank), "tp", mine, store=store))
    KEPT.update(world=Group((0, 1, 2, 3), rank, "world", dist.group.WORLD, store=store), listed=[mine])


def use_pairs() -> list[float]:
    x = torch.tensor([dist.get_rank() + 1.0])
    y = x.clone()
    dist.all_reduce(y, group=KEPT["plain"])
    group, world = KEPT["group"], KEPT["world"]
    sent = group.isend(x, 1 - group.rank)
    received = group.irecv((1,), torch.float32, 1 - group.rank).wait()
    sent.wait()
    assert KEPT["listed"][0] is KEPT["plain"] is group.handle
    return [y.item(), group.all_reduce(x).item(), world.all_reduce(x).item(), received.item()]


def make_groups_and_forget_them() -> None:
    for _ in range(4):
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))


def leave_the_group() -> None:
    dist.destroy_process_group()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return (x.requires_grad_() * factor).sum(dim=0)


def unpicklable() -> object:
    return (i for i in range(3))


# ---- calls -------------------------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order(ranks):
    assert ranks(4, dist.get_rank) == [0, 1, 2, 3]
    assert ranks(4, total) == [10.0] * 4
    assert ranks(4, total, add=1.0) == [14.0] * 4
    assert ranks.each(divmod, [(7, 2), (9, 4)]) == [(3, 1), (2, 1)]


def test_some_ranks_only(ranks):
    assert ranks.pool(4).map(divmod, {3: (9, 4), 1: (7, 2)}) == [(3, 1), (2, 1)]


def test_tensors_travel_without_their_history(ranks):
    (result,) = ranks(1, scaled, torch.ones(3, 2, dtype=torch.float64), 2.0)
    assert torch.equal(result, torch.full((2,), 6.0, dtype=torch.float64))
    assert not result.requires_grad


def test_variables_stay_between_calls(ranks):
    ranks(2, keep, color="green")
    assert ranks(2, kept, "color") == ["green", "green"]


def test_what_cannot_be_sent_is_refused_at_once():
    with Ranks(2) as pool:
        with pytest.raises(ValueError, match="top level"):
            pool.call(lambda: 1)
        with pytest.raises(ValueError, match="each of the 2 ranks, got 1"):
            pool.map(divmod, [(7, 2)])
        with pytest.raises(ValueError, match=r"among 0\.\.1, got \[2\]"):
            pool.map(divmod, {2: (7, 2)})
        assert pool.pids == []  # nothing was started for that
    for arguments in ({"n": 0}, {"n": 2, "timeout": 0}, {"n": 2, "device": "tpu"}):
        with pytest.raises(ValueError, match=r"n >= 1, timeout > 0 and device"):
            Ranks(**arguments)


def test_a_result_that_cannot_travel_is_that_ranks_error(ranks):
    with pytest.raises(RankError, match="generator"):
        ranks(2, unpicklable)
    assert ranks(2, total) == [3.0, 3.0]


# ---- the environment of a rank -----------------------------------------------------------------------------------------------


def test_ranks_have_torchruns_environment_and_share_the_cores(ranks):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for rank, seen in enumerate(ranks(4, environment)):
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        assert expected.items() <= seen.items()
        assert int(seen["threads"]) == max(1, cores // 4)
        assert seen["MASTER_ADDR"] == "127.0.0.1"


def test_the_users_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MINIMEG_TEST", "seen")
    assert threads_per_rank(4) == 3
    with Ranks(2, device="cpu") as pool:
        for seen in pool.call(environment):
            assert (seen["threads"], seen["MINIMEG_TEST"]) == ("3", "seen")


def test_a_busy_port_29500_and_a_second_pool_do_not_matter(ranks):
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("127.0.0.1", 29500))
        busy.listen()
        with Ranks(2, device="cpu") as one, Ranks(2, device="cpu") as other:
            assert one.call(total) == other.call(total) == [3.0, 3.0]


# ---- errors ------------------------------------------------------------------------------------------------------------------


def test_the_failing_rank_is_reported_and_the_pool_goes_on(ranks):
    ranks(4, keep, before="still here")
    pids = ranks.pool(4).pids
    for rank in range(4):
        started = time.monotonic()
        with pytest.raises(RankError) as caught:
            ranks(4, fail_on, rank)
        assert time.monotonic() - started < 10  # and not the 60 s of the timeout
        error = caught.value
        assert (error.kind, error.rank, error.restarted) == ("error", rank, False)
        assert f"rank {rank}: ValueError: boom on {rank}" in str(error)
        assert "raise ValueError" in error.failure.traceback
        assert isinstance(error.failure.exception, ValueError)
        assert sorted(error.waiting) == [r for r in range(4) if r != rank]
        assert all(
            "test_ranks.py:" in place and "in total: dist.all_reduce(x)" in place for place in error.waiting.values()
        )
        assert ranks(4, total) == [10.0] * 4
    assert ranks(4, kept, "before") == ["still here"] * 4
    assert ranks.pool(4).pids == pids


def test_one_mistake_on_all_ranks_is_one_error(ranks):
    with pytest.raises(RankError) as caught:
        ranks(4, fail_everywhere)
    assert str(caught.value).startswith("ranks 0-3: ValueError: the same mistake")
    assert (caught.value.rank, caught.value.also, caught.value.waiting) == (0, (1, 2, 3), {})


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_dies_is_named_and_replaced(ranks, how):
    assert ranks(4, total) == [10.0] * 4
    with pytest.raises(RankError) as caught:
        ranks(4, end_process, 2, how)
    error = caught.value
    assert (error.kind, error.rank, error.restarted) == ("died", 2, True)
    assert {"exit": "exit code 3", "kill": "killed by SIGKILL"}[how] in str(error)
    assert all("in total" in place for place in error.waiting.values())
    assert ranks(4, total) == [10.0] * 4


def test_a_rank_that_died_between_calls_is_replaced_with_a_warning():
    with Ranks(2, device="cpu") as pool:
        pool.call(total)
        os.kill(pool.pids[1], signal.SIGKILL)
        pool._ranks[1].process.join(10)
        with pytest.warns(UserWarning, match="rank 1 died between calls"):
            assert pool.call(total) == [3.0, 3.0]


# ---- hangs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation", ["all_reduce", "barrier", "new_group", "recv", "irecv", "send", "sleep", "loop", "swallow"]
)
def test_a_hang_is_cut_and_explained_and_variables_survive(ranks, operation):
    ranks(4, keep, before=operation)
    pids = ranks.pool(4).pids
    with pytest.raises(RankError) as caught:
        ranks(4, skip_on, 2, operation, timeout=1)
    error = caught.value
    assert (error.kind, error.rank, error.restarted) == ("timeout", None, False)
    collective = operation in ("all_reduce", "barrier", "new_group")
    for rank, place in error.waiting.items():
        if (rank != 2) == collective:
            assert "in skip_on" in place, (rank, place)
            assert place.startswith("waiting at") or operation == "loop", (rank, place)
        else:
            assert place == "finished", (rank, place)
    assert ranks(4, total) == [10.0] * 4
    assert ranks(4, kept, "before") == [operation] * 4
    assert ranks.pool(4).pids == pids


def test_a_rank_that_computes_is_not_said_to_wait(ranks):
    for _ in range(5):  # unless the machine is so busy that the rank gets no turn while it is looked at
        with pytest.raises(RankError) as caught:
            ranks(2, skip_on, 1, "loop", timeout=0.5)
        if "running" in caught.value.waiting[1]:
            return
    pytest.fail(str(caught.value))


def test_ranks_that_cannot_be_freed_are_replaced():
    with Ranks(3, device="cpu") as pool:
        pool.call(keep, before="here")
        with pytest.raises(RankError) as caught:
            pool.call(hold_the_interpreter, 1, timeout=1)
        assert caught.value.restarted
        assert "native code" in caught.value.waiting[1]
        assert "in total" in caught.value.waiting[0]
        assert pool.call(total) == [6.0] * 3
        assert pool.call(kept, "before") == [None] * 3


def test_ctrl_c_in_the_parent_frees_the_ranks(ranks):
    ranks(4, keep, before="interrupt")
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            ranks(4, skip_on, 2, "all_reduce")
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert "rank 2       finished" in caught.value.__notes__[0]
    assert ranks(4, total) == [10.0] * 4
    assert ranks(4, kept, "before") == ["interrupt"] * 4


# ---- groups ------------------------------------------------------------------------------------------------------------------


def test_groups_come_back_after_an_error_in_whatever_held_them(ranks):
    right = [[3.0, 3.0, 10.0, 2.0], [3.0, 3.0, 10.0, 1.0], [7.0, 7.0, 10.0, 4.0], [7.0, 7.0, 10.0, 3.0]]
    ranks(4, make_pairs)
    assert ranks(4, use_pairs) == right
    for _ in range(2):
        with pytest.raises(RankError):
            ranks(4, fail_on, 1)
        assert ranks(4, use_pairs) == right


def test_a_function_may_leave_the_group(ranks):
    ranks(2, leave_the_group)
    assert ranks(2, total) == [3.0, 3.0]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_reset_frees_the_threads_and_files_of_groups(ranks):
    pool = ranks.pool(2)
    pool.reset()
    before = pool.call(threads), pool.call(descriptors)
    for _ in range(5):
        pool.call(make_groups_and_forget_them)
    assert min(pool.call(threads)) > max(before[0])
    pool.reset()
    pool.reset()
    after = pool.call(threads), pool.call(descriptors)
    assert max(after[0]) <= max(before[0]) + 2
    assert max(after[1]) <= max(before[1]) + 8


def test_only_groups_that_all_members_know_are_formed_again():
    pair, other, half = (Membership(n, r, "gloo", 60.0) for n, r in ((2, (0, 1)), (1, (1, 2)), (3, (0, 2))))
    assert agreed([[pair, half], [other, pair], [other]]) == [other, pair]


# ---- who is blamed -----------------------------------------------------------------------------------------------------------


def failure(rank: int, when: float, message: str = "boom", name: str = "ValueError") -> Failure:
    return Failure(rank, when, name, message, f"Traceback of {rank}")


def test_the_first_exception_of_its_own_wins_over_lost_connections():
    lost = failure(0, 1.0, "[gloo] Connection closed by peer [127.0.0.1]:9", "RuntimeError")
    verdict = Story(
        failures={0: lost, 2: failure(2, 2.0), 3: failure(3, 3.0, "later")}, waiting={1: "finished"}
    ).verdict()
    assert (verdict.rank, verdict.kind) == (2, "error")
    assert verdict.waiting[1] == "finished"
    assert verdict.waiting[0] == "waiting"
    assert verdict.waiting[3] == "failed too: ValueError: later"


def test_a_death_wins_over_lost_connections_but_not_over_an_exception():
    lost = failure(0, 1.0, "Connection reset by peer", "RuntimeError")
    assert Story(failures={0: lost}, died={1: -11}).verdict().rank == 1
    aborted_later = Story(failures={0: lost, 2: failure(2, 2.0)}, died={1: -6}).verdict()
    assert aborted_later.rank == 2
    assert aborted_later.waiting[1] == "died: killed by SIGABRT"
    assert Story(failures={0: lost}).verdict().rank == 0


def test_words_of_the_report():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert where_table({3: "a", 0: "b", 1: "b"}) == ["  ranks 0-1  b", "  rank 3     a"]
    assert [exit_reason(code) for code in (-9, 3, None, -250)] == [
        "killed by SIGKILL",
        "exit code 3",
        "its process ended",
        "killed by signal 250",
    ]


# ---- nothing is left behind --------------------------------------------------------------------------------------------------

PARENT = """
import sys
from minimeg.lab.ranks import Ranks
from tests.lab import test_ranks
pool = Ranks(4, device="cpu", timeout=600)
pool.call(test_ranks.total)
print("ready", flush=True)
if sys.argv[1] == "forgotten":
    sys.exit()  # without close()
if sys.argv[1] == "fork":
    import os, time
    if os.fork() == 0:  # holds copies of all pipes
        time.sleep(1000)
if sys.argv[1] == "native":
    pool.call(test_ranks.hold_the_interpreter, 1)
elif sys.argv[1] != "idle":
    pool.call(test_ranks.skip_on, 2, sys.argv[1])
sys.stdin.read()
"""


def session(leader: int) -> set[int]:
    """Process ids of all living processes of the session that ``leader`` opened."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.add(int(entry.name))
    return found


def command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def is_helper(process: int) -> bool:
    """The server of multiprocessing and its resource tracker; a rank is forked from the server and looks like it."""
    return b"resource_tracker" in command(process) or b"forkserver" in command(process)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("state", ["idle", "all_reduce", "recv", "loop", "native", "fork", "forgotten"])
def test_no_process_outlives_its_parent(state):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert parent.stdout.readline() == b"ready\n"
        spared: set[int] = set()
        if state != "forgotten":
            time.sleep(0.5)  # let the ranks block
            everybody = session(parent.pid)
            assert len(everybody) >= 6  # the parent, the server, four ranks
            if state == "fork":
                # The parent's forked copy holds all pipes; it keeps the server, but may not keep the ranks.
                spared = {process for process in everybody - {parent.pid} if not is_helper(process)}
                assert len(spared) == 1
                spared |= {child for child in everybody if child in children(parent.pid)}
            parent.kill()
        parent.wait(30)
        deadline = time.monotonic() + 20
        while (left := session(parent.pid) - spared) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == set()
    finally:
        parent.kill()
        parent.wait(30)
        for process in session(parent.pid):
            os.kill(process, signal.SIGKILL)
        parent.stdin.close()
        parent.stdout.close()


def children(process: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()}
