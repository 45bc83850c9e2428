"""Ctrl-C while training: one checkpoint where one was asked for, no traceback of ours, nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimeg.checkpoint import find
from tests.test_train import ROOT, environment

MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --eval-iters 1"
FLAGS = f"{MODEL} --train-iters 100000 --log-interval 1".split()
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def interrupted(command: list[str], whole_group: bool) -> tuple[int, str, str, list[str]]:
    """Start it, let it take two steps, interrupt it (a terminal tells the whole process group) -> code, output, errors, who is left."""
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), process_group=0
    )
    try:
        assert job.stdout is not None
        told = ""
        while "step     2/" not in told:
            line = job.stdout.readline()
            assert line, f"ended by itself: {told}"
            told += line
        if whole_group:
            os.killpg(job.pid, signal.SIGINT)
        else:
            job.send_signal(signal.SIGINT)
        try:
            output, errors = job.communicate(timeout=20)
        except (
            subprocess.TimeoutExpired
        ):  # an interrupt that strikes inside a destructor is lost, as in any Python program
            os.killpg(job.pid, signal.SIGINT)
            output, errors = job.communicate(timeout=20)
        time.sleep(0.2)
        listed = subprocess.run(["ps", "-eo", "pgid,args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in listed.splitlines() if line.split(maxsplit=1)[0] == str(job.pid)]
        return job.returncode, told + output, errors, left
    finally:
        job.kill()
        job.communicate()


@pytest.mark.parametrize("saves", [False, True])
def test_one_process_ends_with_130_and_without_a_traceback(tmp_path: Path, saves: bool) -> None:
    command = [sys.executable, "-m", "minimeg.train", *FLAGS, *(["--save", str(tmp_path)] if saves else [])]
    code, output, errors, left = interrupted(command, whole_group=False)
    assert code == 130
    assert errors == "minimeg.train: interrupted\n"
    assert left == []
    if saves:
        _, manifest, _ = find(tmp_path)
        assert f"interrupted: saved after step {manifest.step}" in output


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("whole_group", [False, True], ids=["kill -INT of torchrun", "terminal"])
def test_under_torchrun_all_ranks_stop_after_the_same_step_and_save_once(tmp_path: Path, whole_group: bool) -> None:
    command = [*LAUNCHER, "-m", "minimeg.train", "--pp", "2", *FLAGS, "--save", str(tmp_path)]
    code, output, errors, left = interrupted(command, whole_group)
    assert code != 0
    assert left == []
    _, manifest, _ = find(tmp_path)
    assert f"interrupted: saved after step {manifest.step}" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", f"step-{manifest.step:08d}"]
    assert f"SIGINT (Ctrl-C), saved after step {manifest.step}" in errors
    assert "KeyboardInterrupt" not in errors  # the traceback that remains is torchrun's own


def test_under_torchrun_without_a_folder_all_are_gone_at_once(tmp_path: Path) -> None:
    code, _, errors, left = interrupted([*LAUNCHER, "-m", "minimeg.train", "--pp", "2", *FLAGS], whole_group=True)
    assert code != 0
    assert left == []
    assert "SIGINT (Ctrl-C)" in errors
