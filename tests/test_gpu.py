"""What needs CUDA: ``make test-gpu``. Without a GPU everything here is skipped, and nothing of it has been seen to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.test_train import SMALL, text, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
COMPARED = ["--device", "cuda", "--dtype", "float64", "--compare-with-single-process"]


def test_one_rank_on_nccl_gives_the_losses_of_the_cpu(tmp_path: Path) -> None:
    flags = [*SMALL, "--data-path", text(tmp_path), "--dtype", "float64", "--log-interval", "1"]
    gpu, cpu = train(*flags, "--device", "cuda"), train(*flags, "--device", "cpu")
    assert gpu.returncode == cpu.returncode == 0, gpu.stderr
    losses = [[line.split()[3] for line in done.stdout.splitlines() if "  norm" in line] for done in (gpu, cpu)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "layout", ["--tp 2", "--pp 2", "--tp 2 --pp 2", "--tp 2 --sequence-parallel", "--use-distributed-optimizer"]
)
def test_ranks_that_share_a_gpu_are_staged_through_host_memory(tmp_path: Path, layout: str) -> None:
    done = train(
        *SMALL, *COMPARED, *layout.split(), "--data-path", text(tmp_path), ranks=4 if "--tp 2 --pp 2" in layout else 2
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout.splitlines()
    if torch.cuda.device_count() < 2:
        assert "share" in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_a_gpu_for_each_rank_is_nccl(tmp_path: Path) -> None:
    done = train(*SMALL, *COMPARED, "--tp", "2", "--data-path", text(tmp_path), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout.splitlines()
