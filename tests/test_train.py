"""The program: ``python -m minimeg.train``, alone and under torchrun, as a user meets it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 4 --eval-iters 1 --log-interval 2"
)
SMALL = FLAGS.split()


def environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def text(tmp_path: Path) -> str:
    path = tmp_path / "text.py"
    path.write_text("".join(f"def f_{i}(x): return {i * i}\n" for i in range(400)))
    return str(path)


def train(*flags: str, ranks: int = 1, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "minimeg.train", *flags]
    return subprocess.run(command, env=environment(), cwd=cwd, capture_output=True, text=True, timeout=120)


def test_four_ranks_are_compared_with_one_process_and_drawn(tmp_path: Path) -> None:
    flags = f"--tp 2 --pp 2 --dtype float64 --compare-with-single-process --sample 40 --data-path {text(tmp_path)} "
    flags += f"--loss-curve {tmp_path}/out/loss.png --trace {tmp_path}/out/timeline.svg"
    done = train(*SMALL, *flags.split(), ranks=4)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "minimeg: 4 process(es) on cpu, tp=2 pp=2 dp=1, schedule 1f1b, 8 micro-batches of 1 x 16 tokens"
    )
    assert [line.split()[1] for line in lines if re.match(r"step .* loss [\d.]+  norm", line)] == ["1/4", "2/4", "4/4"]
    assert sum("validation loss" in line for line in lines) == 1
    assert "PASS" in lines
    sample = done.stdout.split("-" * 72)[1].strip("\n")
    assert sample.startswith("def ")
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "out/timeline.svg").read_text()
    assert "measured, the last step of this run" in svg
    assert "simulated with the measured times" in svg
    assert "Warning" not in done.stderr


def test_one_process_needs_no_launcher_and_finds_its_text(tmp_path: Path) -> None:
    done = train(*SMALL, "--untie-embeddings-and-output-weights", "--sample", "10", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 process(es)" in done.stdout
    assert "untied" in done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing is written that was not asked for"


def test_a_terminal_shows_a_bar_and_a_file_does_not(tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 100))
    command = [sys.executable, "-m", "minimeg.train", *SMALL, "--data-path", text(tmp_path)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    shown = b""
    try:
        while piece := os.read(reader, 4096):
            shown += piece
    except OSError:  # Linux: the other end is closed
        pass
    printed = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0
    assert b"training: 100%" in shown
    assert b"4/4" in shown
    assert b"loss " in shown
    assert "step " not in printed.replace("validation", "").split("v=256")[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tp 3 --num-layers 0 --data-path nowhere.txt", ["num_layers=0 must be at least 1", "nowhere.txt"]),
        ("--tp 2", ["world_size=1", "tp=2"]),
        ("--save-nothing", ["unrecognized arguments: --save-nothing"]),
        ("--dtype float8", ["invalid choice: 'float8'"]),
    ],
)
def test_what_cannot_run_is_refused_with_exit_code_2(flags: str, words: list[str]) -> None:
    done = train(*flags.split())
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


def test_under_torchrun_one_rank_says_it_once(tmp_path: Path) -> None:
    done = train(*SMALL, "--tp", "2", "--pp", "2", ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("this run cannot start") == 1
    assert "tp=2" in done.stderr
