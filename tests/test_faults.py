"""A rank that fails: who is named, how soon all are gone, what remains. CASES 45 and 49; the training program under torchrun.

Every launch costs about six seconds, so ``make test`` holds one for each way to fail; ``make soak`` has all ranks, phases and kinds.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from minimeg.comm import CommunicationError
from minimeg.faults import BOX, PHASES, Fault, InjectedFault, watch
from minimeg.faults.blackbox import SIZE, BlackBox, Snapshot, StateFile, ending_of, read
from minimeg.faults.postmortem import classify, summary, verdict
from minimeg.faults.watcher import Watcher
from minimeg.ledger import RECORDER, Entry
from minimeg.parallel_state import single_process

ROOT = Path(__file__).parents[1]

# ---- MINIMEG_FAULT ---------------------------------------------------------------------------------------------------------


def test_a_fault_is_read_from_its_four_fields() -> None:
    assert Fault.parse("2:3:forward:kill", 4) == Fault(2, 3, "forward", "kill")
    assert Fault.parse("0:0:message-wait:slow=1.5", 1) == Fault(0, 0, "message wait", "slow", 1.5)


def test_everything_wrong_with_a_fault_is_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        Fault.parse("4:-1:lunch:maim", 4)
    for word in ("0..3", "'4'", "'-1'", "'lunch'", "forward, message wait", "'maim'", "kill, raise, exit, stop, slow"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="rank:step:phase:kind"):
        Fault.parse("1:forward:kill", 4)
    with pytest.raises(ValueError, match="only slow takes seconds"):
        Fault.parse("1:0:forward:kill=3", 4)


def test_a_fault_strikes_once_and_not_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIMEG_FAULT", "0:1:optimizer:raise")
    with watch(single_process()) as box:
        box.enter("optimizer", 0)
        box.enter("data", 1)
        with pytest.raises(InjectedFault, match="step 1, phase optimizer"):
            box.enter("optimizer")
        box.enter("optimizer")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with watch(single_process()) as box:
        box.enter("optimizer", 1)


def test_a_fault_that_never_came_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINIMEG_FAULT", "0:7:optimizer:raise")
    with watch(single_process()) as box:
        box.enter("optimizer", 0)
    assert "without" in capsys.readouterr().err
    assert not BOX.on_enter


def test_watching_a_single_process_changes_nothing_but_the_record() -> None:
    def surroundings() -> tuple[object, ...]:
        return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), threading.active_count()

    def fail() -> None:
        with watch(single_process()) as box:
            assert surroundings() == before
            assert RECORDER.observers == [box.operation]
            raise ZeroDivisionError

    before = surroundings()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert RECORDER.observers == []


# ---- the black box ---------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_by_another_descriptor_of_an_unlinked_file(tmp_path: Path) -> None:
    mine = StateFile.create(str(tmp_path / "rank-3.state"))
    theirs = StateFile.open(str(tmp_path / "rank-3.state"))
    (tmp_path / "rank-3.state").unlink()
    box = BlackBox()
    box.attach(mine.memory, "tp=1 pp=1")
    box.enter("data", 12)
    box.enter("message wait")
    box.operation(Entry(7, "recv", "pp", "float32[64, 2, 64] from 0 tag 3", 0.0))
    seen = read(theirs.memory, 3)
    assert (seen.name, seen.pid, seen.place) == ("rank 3 (tp=1 pp=1)", os.getpid(), "step 12, phase message wait")
    assert seen.operation == "recv float32[64, 2, 64] from 0 tag 3 over pp"
    assert seen.ending == "running"
    assert theirs.owner_lives()
    box.end("failed", "ValueError: no", "Traceback ...")
    box.end("lost", "a consequence")  # the first ending stands
    seen = read(theirs.memory, 3)
    assert (seen.ending, seen.line, seen.trace) == ("failed", "ValueError: no", "Traceback ...")
    mine.close()
    assert not theirs.owner_lives()
    assert ending_of(theirs.memory) == "failed"
    theirs.close()


def test_texts_longer_than_their_place_are_cut_and_spill_into_nothing(tmp_path: Path) -> None:
    box, memory = BlackBox(), bytearray(SIZE)
    box.attach(memory, "c" * 1000)
    box.operation(Entry(1, "all_reduce", "tp", "x" * 10_000, 0.0))
    box.enter("forward", 1)
    box.end("failed", "é" * 5000, "\n".join(f"line {i}" for i in range(100_000)))
    seen = read(memory, 0)
    assert len(memory) == SIZE
    assert seen.place == "step 1, phase forward"
    assert seen.operation.startswith("all_reduce xxx")
    assert seen.line.startswith("ééé")
    assert seen.trace.endswith("line 99999")  # the end of a stack tells


def test_a_dead_process_is_seen_before_anybody_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.state"
    code = f"from minimeg.faults.blackbox import StateFile; f = StateFile.create({str(path)!r}); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    theirs = StateFile.open(str(path))
    assert theirs.owner_lives()
    child.send_signal(signal.SIGKILL)
    _until(lambda: not theirs.owner_lives(), 10)  # nobody has called wait(): it is a zombie
    child.communicate()
    theirs.close()


def test_what_a_watcher_takes_for_trouble(tmp_path: Path) -> None:
    own, peer = (StateFile.create(str(tmp_path / name)) for name in ("rank-0.state", "rank-1.state"))
    mine, theirs = BlackBox(), BlackBox()
    mine.attach(own.memory, "tp=0")
    theirs.attach(peer.memory, "tp=1")
    watcher = Watcher(mine, 0, 2, own, {1: StateFile.open(str(tmp_path / "rank-1.state"))}, -1, silence=1.0)
    for beat in range(10):  # it beats, and so it may be slow
        theirs.beat(beat)
        assert not watcher._trouble(0.5)
    assert [watcher._trouble(0.4) for _ in range(3)] == [False, False, True]  # 1.2 s without a beat
    theirs.beat(10)
    assert not watcher._trouble(0.5)
    peer.close()
    assert watcher._trouble(0.1)  # the lock is free and nothing was said
    theirs.attach(watcher.peers[1].memory, "tp=1")  # its own mapping went with it
    theirs.end("done")
    assert not watcher._trouble(5.0)  # gone, silent, and all is well
    watcher.peers[1].close()
    own.close()


# ---- the verdict -----------------------------------------------------------------------------------------------------------


def _rank(rank: int, **facts: object) -> Snapshot:
    return Snapshot(rank, 1000 + rank, f"tp={rank % 2} pp={rank // 2}", 3, "forward", "all_reduce x over tp", **facts)  # type: ignore[arg-type]


LOST = {"ending": "lost", "line": "Connection closed by peer"}
LATE = {"ending": "late", "line": "Timed out waiting 5000ms"}
TERM = {"ending": "signal", "line": "SIGTERM"}
DEAD = {"alive": False}


@pytest.mark.parametrize(
    ("expected", "facts"),
    [
        # a death, although the neighbour's error was told and the death was not
        (2, [{**LOST, "ending_time": 9.1}, {**TERM, "ending_time": 9.2}, {**DEAD, "last_sign": 9.0}, {}]),
        # two errors: the first by time, not by rank
        (
            3,
            [
                {"ending": "failed", "line": "b", "ending_time": 9.2},
                {},
                {**LOST, "ending_time": 9.05},
                {"ending": "failed", "line": "a", "ending_time": 9.1},
            ],
        ),
        # an error of its own comes before a lost connection, even one that was written earlier
        (1, [{**LOST, "ending_time": 8.0}, {"ending": "failed", "line": "a", "ending_time": 9.0}]),
        # gloo aborts a rank whose peer is gone: a consequence, though its last sign of life is older
        (1, [{**DEAD, "last_sign": 8.8, "trace": "Fatal Python error: Aborted\n"}, {**DEAD, "last_sign": 9.0}]),
        # nothing but an abort
        (1, [{**LOST, "ending_time": 9.0}, {**DEAD, "last_sign": 8.8, "trace": "Fatal Python error: Aborted\n"}]),
        # a stopped rank, before those that waited for it in vain
        (3, [{**LATE, "ending_time": 9.0}, {**LATE, "ending_time": 9.1}, {"waits": True}, {"silent": 5.0}]),
        # a stopped rank, also before one that is busy for longer
        (1, [{**LATE, "ending_time": 9.0}, {"silent": 5.0, "place_time": 4.0}, {"place_time": 3.0}]),
        # a rank that was merely slow to beat is not accused while another has an error of its own
        (0, [{"ending": "failed", "line": "a", "ending_time": 9.0}, {"silent": 2.5}]),
        # nobody failed, one kept the others waiting
        (
            1,
            [
                {**LATE, "ending_time": 9.0},
                {"place_time": 4.0},
                {"waits": True, "place_time": 3.0},
                {"place_time": 5.0},
            ],
        ),
        # all waited: a deadlock; the first to give up
        (2, [{**LATE, "ending_time": 9.1}, {"waits": True}, {**LATE, "ending_time": 9.0}]),
        # done and gone is no death
        (1, [{"ending": "done", **DEAD}, {**LOST, "ending_time": 9.0}]),
        # told from outside
        (1, [{**TERM, "ending_time": 9.01}, {**TERM, "ending_time": 9.0}]),
    ],
)
def test_the_first_failure_is_named(expected: int, facts: list[dict[str, object]]) -> None:
    ranks = [_rank(r, **fact) for r, fact in enumerate(facts)]
    assert verdict(ranks).rank == expected
    first, *rest = summary(ranks).splitlines()
    assert f"rank {expected} (" in first
    assert "step 3, phase forward" in first
    assert "last operation: all_reduce x over tp" in first
    for rank, line in zip(ranks, rest, strict=False):
        assert f"rank {rank.rank} (tp={rank.rank % 2} pp={rank.rank // 2})" in line


def test_ranks_of_other_hosts_are_mentioned() -> None:
    text = summary([_rank(0, **LOST)], elsewhere=4)
    assert "no rank of this host failed by itself" in text.splitlines()[0]
    assert "4 more ranks are on other hosts" in text


def _communication_error(cause: Exception) -> CommunicationError:
    error = CommunicationError(
        f"rank 0 (tp=0): recv over pp failed: {cause}\nThe last operations of this rank:\n#1 ..."
    )
    error.__cause__ = cause
    return error


GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
CLOSED = "Connection closed by peer [::1]:1"
RESET = "Read error [::1]:1: Connection reset by peer"
SLOW = "Timed out waiting 5000ms for recv operation to complete"
WRONG = "position 0 of pp sent float32[4], but float32[8] was expected"


@pytest.mark.parametrize(
    ("error", "ending", "line"),
    [
        (ValueError("Connection closed by peer"), "failed", "ValueError: Connection closed by peer"),
        (RuntimeError("mat1 and mat2 shapes"), "failed", "RuntimeError: mat1 and mat2 shapes"),
        (SystemExit(0), "failed", "SystemExit(0) in the middle of the run"),
        (KeyboardInterrupt(), "signal", "SIGINT (Ctrl-C)"),
        (KeyboardInterrupt("saved after step 3"), "signal", "SIGINT (Ctrl-C), saved after step 3"),
        (_communication_error(RuntimeError(GLOO + CLOSED)), "lost", CLOSED),
        (
            _communication_error(RuntimeError(f"{GLOO}{RESET}. This is typically caused by a remote worker")),
            "lost",
            RESET,
        ),
        (
            _communication_error(dist.DistNetworkError("failed to recv, got 0 bytes")),
            "lost",
            "failed to recv, got 0 bytes",
        ),
        (_communication_error(RuntimeError(GLOO + SLOW)), "late", SLOW),
        (_communication_error(dist.DistStoreError("wait timeout after 5000ms")), "late", "wait timeout after 5000ms"),
        (
            _communication_error(RuntimeError(WRONG)),
            "failed",
            f"minimeg.comm.CommunicationError: rank 0 (tp=0): recv over pp failed: {WRONG}",
        ),
    ],
)
def test_a_lost_connection_is_a_consequence_and_a_wrong_message_is_not(
    error: BaseException, ending: str, line: str
) -> None:
    assert classify(error) == (ending, line)


# ---- real runs -------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A launched program, its output with the time of each line, and a word in its arguments by which its processes are found."""

    process: subprocess.Popen[str]
    marker: str
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def find(self, pattern: str) -> float | None:
        """When a line that matches was seen first."""
        return next((seen for seen, line in self.lines if re.search(pattern, line)), None)

    def pids(self) -> list[int]:
        """All processes of this job, the launcher included, wherever they hang in the tree of processes."""
        table = subprocess.run(["ps", "-axww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
        return [int(row.split()[0]) for row in table.splitlines() if self.marker in row]

    def ranks(self) -> list[int]:
        """Process ids in rank order: torchrun starts them in that order."""
        return sorted(set(self.pids()) - {self.process.pid})

    @property
    def summaries(self) -> list[str]:
        """The first lines of all summaries."""
        return [
            line
            for _, line in self.lines
            if re.match(r"minimeg: .*(failed first|kept the others|ended from|no rank)", line)
        ]


@contextmanager
def _job(command: list[str], marker: str, folder: Path, **environment: str) -> Iterator[Job]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINIMEG_", "TORCHELASTIC_"))}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    job = Job(process, marker)
    reader = threading.Thread(target=job.read)
    reader.start()
    try:
        yield job
    finally:
        for pid in job.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


STEPS = 6


@contextmanager
def _training(
    tmp_path: Path, *flags: str, launcher: tuple[str, ...] = (), steps: int = STEPS, **environment: str
) -> Iterator[Job]:
    text = tmp_path / "text" / "a.txt"
    text.parent.mkdir()
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(400)))
    folder = tmp_path / "tmp"
    folder.mkdir()
    tiny = "--tp 2 --pp 2 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", *launcher]
    command += ["-m", "minimeg.train", *tiny.split(), "--global-batch-size", "4", "--train-iters", str(steps)]
    command += [
        "--lr-warmup-iters",
        "1",
        "--log-interval",
        "1",
        "--eval-iters",
        "1",
        "--device",
        "cpu",
        "--data-path",
        str(text),
        *flags,
    ]
    with _job(command, str(text), folder, **environment) as job:
        yield job


def _until(condition: Callable[[], object], seconds: float) -> float:
    """Seconds until the condition held."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            pytest.fail(f"not within {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - start


def _check_end(job: Job, tmp_path: Path, seconds: float, since: float | None) -> None:
    """Everything gone in time, one summary, exit code not 0, nothing left behind."""
    try:
        code = job.process.wait(90)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still there:\n{job.output}")
    _until(lambda: not job.pids(), 1)
    ended = time.monotonic()
    assert code != 0, job.output
    assert since is not None, job.output
    assert ended - since < seconds, f"{ended - since:.1f} s\n{job.output}"
    assert len(job.summaries) == 1, job.output
    _check_clean(tmp_path)
    print(f"gone after {ended - since:.2f} s: {job.summaries[0]}")


def _check_clean(tmp_path: Path) -> None:
    left = [path.name for path in (tmp_path / "tmp").iterdir() if path.name.startswith("minimeg")]
    assert left == []


def _check_fault(
    tmp_path: Path, rank: int, phase: str, kind: str, step: int = 3, seconds: float = 10.0, *flags: str
) -> Job:
    """Run with a fault; the summary must name exactly this rank, step and phase."""
    step = STEPS - 1 if phase in ("evaluation", "gather") else step
    with _training(tmp_path, *flags, MINIMEG_FAULT=f"{rank}:{step}:{phase}:{kind}") as job:
        job.process.wait(90)
        _check_end(
            job,
            tmp_path,
            seconds,
            since=job.find(rf"^step +{step if phase not in ('evaluation', 'gather') else STEPS}/"),
        )
    first = job.summaries[0]
    expected = {
        "kill": "died without a word",
        "exit": "died without a word",
        "raise": "InjectedFault: MINIMEG_FAULT",
        "stop": "no sign of life",
    }
    assert first.startswith(
        f"minimeg: rank {rank} (tp={rank % 2} pp={rank // 2}) failed first, step {step}, phase {phase}: "
    ), job.output
    assert expected[kind] in first
    for other in {0, 1, 2, 3} - {rank}:
        assert re.search(rf"^  then   rank {other} \(tp={other % 2} pp={other // 2}\): ", job.output, re.M), job.output
    return job


def test_kill_in_a_message_wait(tmp_path: Path) -> None:
    job = _check_fault(tmp_path, 2, "message wait", "kill")
    assert "last operation: recv float32[16, 1, 16] from 0" in job.summaries[0]


def test_an_exception_is_told_once_with_its_stack(tmp_path: Path) -> None:
    job = _check_fault(tmp_path, 1, "backward", "raise")
    assert job.output.partition("ChildFailedError")[0].count("in strike") == 1
    assert "the stack of rank 1:\nTraceback (most recent call last):" in job.output
    blamed = job.output.partition("Root Cause")[
        2
    ]  # torchrun says the same: this rank, and from its error file the exception
    assert re.search(r"rank +: 1 \(local_rank: 1\)", blamed)
    assert "InjectedFault: MINIMEG_FAULT" in blamed


def test_exit_code_0_in_the_middle_is_a_failure(tmp_path: Path) -> None:
    _check_fault(tmp_path, 0, "optimizer", "exit")


def test_a_stopped_rank_is_found_and_killed(tmp_path: Path) -> None:
    _check_fault(tmp_path, 3, "forward", "stop", 3, 5 + 10, "--timeout", "5")


def test_kill_9_from_outside(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    rank = chance.randrange(4)
    print(f"seed {seed}, rank {rank}")
    with _training(tmp_path, steps=100_000) as job:
        _until(lambda: job.find(r"^step +3/"), 60)
        time.sleep(chance.random())
        os.kill(job.ranks()[rank], signal.SIGKILL)
        _check_end(job, tmp_path, 10, since=time.monotonic())
    assert job.summaries[0].startswith(f"minimeg: rank {rank} (tp={rank % 2} pp={rank // 2}) failed first, step ")
    phase = re.search(r"phase ([a-z ]+): died without a word", job.summaries[0])
    assert phase is not None
    assert phase[1] in PHASES


def test_a_slow_rank_is_no_failure_and_a_good_end_is_silent(tmp_path: Path) -> None:
    with _training(tmp_path, "--timeout", "20", MINIMEG_FAULT="1:2:forward:slow=4") as job:
        assert job.process.wait(90) == 0, job.output
        _until(lambda: not job.pids(), 5)
    assert job.summaries == []
    _check_clean(tmp_path)


PROGRAM = """
import sys, time
from minimeg.faults import watch
from minimeg.parallel_state import initialize_model_parallel
import torch

state = initialize_model_parallel(2)
with watch(state) as box:
    for step in range(100_000):
        box.enter("forward", step)
        state.tp.all_reduce(torch.ones(4))
        if step == 50:
            if state.rank == 1:
                sys.exit(0)
            time.sleep(300)
"""


def test_without_a_launcher_the_watchers_find_out_themselves(tmp_path: Path) -> None:
    """Started by hand: nobody sends SIGTERM. One leaves by ``sys.exit(0)``, the other is busy and would not notice."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "tmp").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(program)]
    with (
        _job(command, str(program), tmp_path / "tmp", RANK="0", LOCAL_RANK="0", **place) as zero,
        _job(command, str(program), tmp_path / "tmp", RANK="1", LOCAL_RANK="1", **place) as one,
    ):
        codes = zero.process.wait(60), one.process.wait(60)  # far less than the 300 s of the other
    assert codes == (1, 1)
    summaries = zero.summaries + one.summaries
    assert len(summaries) == 1, zero.output + one.output
    assert summaries[0].startswith(
        "minimeg: rank 1 (tp=1) failed first, step 50, phase forward: SystemExit(0) in the middle of the run"
    )
    _check_clean(tmp_path)


# ---- make soak -------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["kill", "raise", "exit"])
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("start", "weight gradients")])
def test_each_kind_in_each_phase_of_each_rank(tmp_path: Path, rank: int, phase: str, kind: str) -> None:
    _check_fault(tmp_path, rank, phase, kind)


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", ["data", "message wait", "backward", "optimizer"])
def test_stop_in_each_rank(tmp_path: Path, rank: int, phase: str) -> None:
    _check_fault(tmp_path, rank, phase, "stop", 3, 5 + 10, "--timeout", "5")


@pytest.mark.soak
def test_a_stopped_rank_is_found_long_before_the_wait_of_the_others_ends(tmp_path: Path) -> None:
    _check_fault(tmp_path, 2, "forward", "stop", 3, 20 + 10, "--timeout", "60")


@pytest.mark.soak
def test_a_rank_that_keeps_the_others_waiting_is_named(tmp_path: Path) -> None:
    with _training(tmp_path, "--timeout", "5", MINIMEG_FAULT="1:3:backward:slow=60") as job:
        job.process.wait(90)
        _check_end(job, tmp_path, 5 + 10, since=job.find(r"^step +3/"))
    assert job.summaries[0].startswith(
        "minimeg: rank 1 (tp=1 pp=0) kept the others waiting, step 3, phase backward: busy for"
    )
    assert "time.sleep(self.seconds)" in job.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (
            lambda job: os.kill(job.ranks()[1], signal.SIGSEGV),
            r"rank 1 \(tp=1 pp=0\) failed first, .*Segmentation fault",
        ),
        (lambda job: os.kill(job.ranks()[2], signal.SIGTERM), r"ended from outside: rank 2 .* SIGTERM"),
        (lambda job: job.process.send_signal(signal.SIGTERM), r"ended from outside: rank \d .* SIGTERM"),
        (
            lambda job: [os.kill(pid, signal.SIGINT) for pid in job.pids()],
            r"ended from outside: rank \d .* SIGINT \(Ctrl-C\)",
        ),
    ],
    ids=["segmentation fault", "SIGTERM to one rank", "SIGTERM to torchrun", "Ctrl-C"],
)
def test_signals_from_outside(tmp_path: Path, act: Callable[[Job], object], expected: str) -> None:
    with _training(tmp_path, steps=100_000) as job:
        _until(lambda: job.find(r"^step +3/"), 60)
        act(job)
        _check_end(job, tmp_path, 10, since=time.monotonic())
    assert re.match("minimeg: " + expected, job.summaries[0]), job.output


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(20))
def test_kill_9_from_outside_again_and_again(tmp_path: Path, trial: int) -> None:
    test_kill_9_from_outside(tmp_path)
