"""Hundreds of steps leak nothing: resident memory, open files and activations of four ranks, from step 50 to step 500.

What is alive in torch is counted by torch (``activation_memory``, and the tensors that the garbage collector knows); what is not, a
buffer of gloo's or a file that a checkpoint left open, only the operating system sees.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minimeg.checkpoint import Writer
from minimeg.comm import ledger
from minimeg.data import TextDataset, encode
from minimeg.memory import activation_memory
from minimeg.options import Options
from minimeg.parallel_state import initialize_model_parallel
from minimeg.pipeline import Recorder
from minimeg.resume import save
from minimeg.trainer import Trainer

STEPS, WARM, EVERY = 500, 50, 50
GROWTH = 0.01

OPTIONS = Options(
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    micro_batch_size=2,
    global_batch_size=8,
    train_iters=STEPS,
    eval_iters=1,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)


@dataclass(frozen=True)
class Look:
    """At one rank between two steps. ``held``: bytes that autograd still keeps of the step that has just ended, of ``peak`` at most."""

    done: int
    resident: int
    files: int
    tensors: int
    held: int
    peak: int
    loss: float


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def watched(folder: str) -> list[Look]:
    """Train as the loop does, with a checkpoint, a timeline and a validation now and then, and look up every 50 steps."""
    state = initialize_model_parallel(2, 2)
    # Long enough for one epoch: of each epoch read, a permutation stays in a (bounded) cache.
    text = "".join(f"def f_{i}(x): return {i * i}\n" for i in range(20_000))
    trainer = Trainer(OPTIONS, state, TextDataset(encode(text), OPTIONS.seq_length))
    writer = Writer(Path(folder), state, keep=2)
    looks = []
    for step in range(STEPS):
        done = step + 1
        recorder = Recorder() if done % 10 == 0 else None
        with activation_memory() as memory, ledger():
            report = trainer.step(step, recorder)
        if recorder is not None:
            recorder.timeline(trainer.schedule, state.pp)
        if done % EVERY == EVERY // 2:  # half-way, so that a look sees what is left of it
            save(writer, trainer, done)
            trainer.evaluate()
        if done % EVERY == 0:
            gc.collect()
            tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
            looks.append(Look(done, resident_bytes(), open_files(), tensors, memory.live, memory.peak, report.loss))
    # All have looked: a rank that leaves closes its end of a connection, and gloo then closes ours.
    state.world.all_gather_json(None)
    state.destroy()
    return looks


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="asks Linux for its figures")
def test_five_hundred_steps_leak_nothing(ranks, tmp_path: Path) -> None:
    found = ranks(4, watched, str(tmp_path), timeout=900)
    for rank, looks in enumerate(found):
        first, last = looks[0], looks[-1]
        assert (first.done, last.done) == (WARM, STEPS)
        grown = [f"{look.resident / first.resident - 1:+.2%}" for look in looks[1:]]
        print(
            f"rank {rank}: {first.resident / 2**20:.1f} MiB after step {WARM}, then {' '.join(grown)}; "
            f"{first.files} files, {first.tensors} tensors, activations {first.peak:,} B at the peak and "
            f"{max(look.held for look in looks)} B after a step"
        )
    for rank, looks in enumerate(found):
        first, last = looks[0], looks[-1]
        assert last.loss < first.loss, "it did not train"
        assert all(look.peak == first.peak > 0 for look in looks), (rank, looks)
        assert [look.held for look in looks] == [0] * len(looks), f"rank {rank}: an activation outlives its step"
        assert {look.files for look in looks} == {first.files}, f"rank {rank}: {[look.files for look in looks]} files"
        assert {look.tensors for look in looks} == {first.tensors}, f"rank {rank}: {[look.tensors for look in looks]}"
        assert last.resident <= (1 + GROWTH) * first.resident, f"rank {rank}: {[look.resident for look in looks]} B"
