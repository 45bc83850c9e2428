"""Starting the program in all the ways that go wrong: the right result, or one clear line soon."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_train import ROOT, environment

SMALL = (
    "--train-iters 2 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --timeout 3 --eval-iters 1"
)
FLAGS = SMALL.split()
TRAIN = [sys.executable, "-m", "minimeg.train", *FLAGS]


def start(command: list[str], **settings: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(*flags: str, ranks: int = 2) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        "--nproc-per-node",
        str(ranks),
        "-m",
        "minimeg.train",
        *FLAGS,
    ]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but RANK is not set: start with python -m torch.distributed.run"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "environment variable RANK must be an integer, got 'x'"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "environment variable WORLD_SIZE must be an integer, got 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK=5 must lie in 0..1, since WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2, but MASTER_ADDR and MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "free"}, "1/2 clients joined"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "busy"}, "address already in use"),
    ],
)
def test_a_wrong_environment_is_one_line_within_ten_seconds(variables: dict[str, str], words: str) -> None:
    """CASE 46 for the busy port, with host, port and remedy in the line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"busy": str(taken.getsockname()[1]), "free": str(free_port())}
        port = ports.get(variables.get("MASTER_PORT", ""))
        variables = variables | ({"MASTER_PORT": port} if port else {})
        began = time.monotonic()
        done = subprocess.run(TRAIN, env=environment() | variables, capture_output=True, text=True, timeout=30)
    assert time.monotonic() - began < 10
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("minimeg.train: error: ")]
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in done.stderr
    if port:
        assert f"127.0.0.1:{port}" in lines[0]
        assert "--standalone" in lines[0]


@pytest.mark.parametrize("how", ["closed from the start", "nobody reads on"])
def test_a_run_outlives_its_reader(how: str, tmp_path: Path) -> None:
    command = " ".join([*TRAIN, "--log-interval 1", f"--run-dir {tmp_path}/run"])
    end = " >&-" if how == "closed from the start" else " | head -n 1 > /dev/null"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command + end], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_two_jobs_at_once_on_one_machine() -> None:
    """CASE 46: the default port is taken, and two jobs start together."""
    with socket.socket() as default_port:
        try:
            default_port.bind(("127.0.0.1", 29500))
            default_port.listen()
        except OSError:
            pass  # taken by somebody else: as good
        jobs = [start([*torchrun("--standalone"), "--tp", "2"], env=environment()) for _ in range(2)]
        ends = [(*job.communicate(timeout=90), job.returncode) for job in jobs]
    assert [code for _, _, code in ends] == [0, 0], ends
    assert ends[0][0].splitlines()[0] == ends[1][0].splitlines()[0]


def test_two_launchers_form_one_world() -> None:
    """The two-node recipe of the docs, with both nodes on loopback."""
    port = str(free_port())
    common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    flags = ["--tp", "2", "--pp", "2", "--dtype", "float64", "--compare-with-single-process"]
    jobs = [
        start([*torchrun(*common, "--node-rank", str(node)), *flags], env=environment(), cwd=ROOT) for node in (0, 1)
    ]
    (said, errors, first), (_, _, second) = [(*job.communicate(timeout=120), job.returncode) for job in jobs]
    assert (first, second) == (0, 0), errors
    assert "minimeg: 4 process(es)" in said
    assert "PASS" in said.splitlines()
