"""Random failures of random ranks in every phase, also while a checkpoint is written: all gone soon, named, and resumed to the bit."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg.checkpoint import find
from minimeg.checkpoint.reader import whole
from minimeg.records import read_metrics
from tests.test_faults import STEPS, _training, _until

PHASES = [
    "forward",
    "message wait",
    "backward",
    "reductions",
    "optimizer",
    "shard write",
    "manifest",
    "rename",
    "prune",
]
KINDS = ["kill", "raise", "exit"]
SEED = 2026


def trials(count: int, ranks: int) -> list[tuple[int, int, str, str]]:
    """(rank, step, phase, kind). Every phase comes up; only rank 0 writes manifests."""
    dice = random.Random(SEED)
    found = []
    for number in range(count):
        phase = PHASES[number % len(PHASES)]
        rank = 0 if phase in ("manifest", "rename", "prune") else dice.randrange(ranks)
        found.append((rank, dice.randrange(1, STEPS), phase, dice.choice(KINDS)))
    return found


TWO = ("--nproc-per-node", "2")  # half the processes, half the time; the soak has four


def flags(folder: Path, ranks: int) -> list[str]:
    dropout = ["--hidden-dropout", "0.1", *(["--tp", "1"] if ranks == 2 else [])]
    return [
        "--save",
        f"{folder}/ck",
        "--load",
        f"{folder}/ck",
        "--save-interval",
        "1",
        "--run-dir",
        f"{folder}/run",
        *dropout,
    ]


def outcome(folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """What a finished run gave: the numbers of every step, and every tensor of its last checkpoint."""
    metrics = [
        [line[name] for name in ("step", "loss", "norm", "learning_rate")] for line in read_metrics(folder / "run")
    ]
    place, manifest, _ = find(folder / "ck")
    assert manifest.step == STEPS
    return metrics, {name: whole(place, manifest, name) for name in manifest.tensors}


def same(one: tuple[list[Any], dict[str, Tensor]], other: tuple[list[Any], dict[str, Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Tensor]]:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), 2)


def undisturbed_run(folder: Path, ranks: int) -> tuple[list[Any], dict[str, Tensor]]:
    with _training(folder, *flags(folder, ranks), launcher=TWO if ranks == 2 else ()) as job:
        assert job.process.wait(90) == 0, job.output
    return outcome(folder)


def fail_and_resume(folder: Path, trial: tuple[int, int, str, str], undisturbed: Any, ranks: int = 2) -> None:
    """One launch that fails, one that goes on."""
    rank, step, phase, kind = trial
    launcher = TWO if ranks == 2 else ()
    with _training(
        folder, *flags(folder, ranks), launcher=launcher, MINIMEG_FAULT=f"{rank}:{step}:{phase}:{kind}"
    ) as job:
        began = time.monotonic()
        code = job.process.wait(90)
        _until(lambda: not job.pids(), 2)
        ended = time.monotonic()
        since = job.find(rf"^step +{step}/") or began
        assert code != 0, (SEED, trial, job.output)
        assert ended - since < 10, (SEED, trial, job.output)
        assert job.summaries[0].startswith(f"minimeg: rank {rank} "), (SEED, trial, job.output)
    complete = [path for path in (folder / "ck").glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]
    assert complete, (SEED, trial, "there must always be a complete one after the first step")
    for leftover in ("text", "tmp"):  # of the first launch, in the way of the second
        shutil.rmtree(folder / leftover)
    with _training(folder, *flags(folder, ranks), launcher=launcher) as job:
        assert job.process.wait(90) == 0, (SEED, trial, job.output)
        assert "going on after step" in job.output
    assert same(outcome(folder), undisturbed), (SEED, trial)


@pytest.mark.parametrize("trial", trials(6, 2), ids=lambda t: "-".join(map(str, t)).replace(" ", "_"))
def test_a_run_that_was_killed_goes_on_to_the_same_end(tmp_path: Path, undisturbed: Any, trial: Any) -> None:
    """CASE 40 for the phases of a save."""
    fail_and_resume(tmp_path, trial, undisturbed)


@pytest.mark.parametrize("trial", trials(12, 2)[6:], ids=lambda t: "-".join(map(str, t)).replace(" ", "_"))
def test_torchrun_restarts_it_by_itself(tmp_path: Path, undisturbed: Any, trial: Any) -> None:
    rank, step, phase, kind = trial
    launcher = (*TWO, "--max-restarts", "1")
    with _training(
        tmp_path, *flags(tmp_path, 2), launcher=launcher, MINIMEG_FAULT=f"{rank}:{step}:{phase}:{kind}"
    ) as job:
        assert job.process.wait(120) == 0, (SEED, trial, job.output)
        assert job.summaries[0].startswith(f"minimeg: rank {rank} "), (SEED, trial, job.output)
        assert "going on after step" in job.output
    assert same(outcome(tmp_path), undisturbed), (SEED, trial)


@pytest.mark.soak
def test_two_hundred_of_them(tmp_path: Path) -> None:
    expected = undisturbed_run(tmp_path, 4)
    for number, trial in enumerate(trials(200, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fail_and_resume(folder, trial, expected, ranks=4)


def test_the_numbers_on_disk_are_those_of_the_steps(undisturbed: Any) -> None:
    metrics, tensors = undisturbed
    assert [line[0] for line in metrics] == list(range(1, STEPS + 1))
    assert {name.split("/")[0] for name in tensors} == {"parameter", "exp_avg", "exp_avg_sq"}
    assert json.dumps(metrics)
