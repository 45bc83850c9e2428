"""A run that was saved, and one that is loaded: bit for bit in the same layout, and the same whole tensors in any other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg.checkpoint import CheckpointError, Writer, find
from minimeg.checkpoint.reader import whole
from minimeg.options import Options
from minimeg.parallel_state import ParallelState, initialize_model_parallel, single_process
from minimeg.parameter import full_state, named_shards
from minimeg.resume import about, changes, entries_of, resume, save
from minimeg.trainer import StepReport, Trainer
from tests.test_train import environment
from tests.test_trainer import SMALL, dataset

DROPOUT = replace(SMALL, hidden_dropout=0.1, attention_dropout=0.1, global_batch_size=8, train_iters=6)


def layout(tp: int = 1, pp: int = 1, world: int = 8, **more: Any) -> tuple[int, Options]:
    return world, replace(DROPOUT, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **more)


LAYOUTS = {
    "one": layout(world=1),
    "tp2-pp2-dp2": layout(2, 2),
    "tp2-pp2-dp2-zero": layout(2, 2, use_distributed_optimizer=True),
    "tp4-dp2-sp-zero": layout(4, sequence_parallel=True, use_distributed_optimizer=True),
    "pp4-dp2": layout(1, 4, num_layers=5),
    "pp2-n2-dp4-zero": layout(1, 2, virtual_pipeline_model_parallel_size=2, use_distributed_optimizer=True),
    "dp8-zero": layout(use_distributed_optimizer=True),
    "tp2-pp4-bf16": layout(2, 4, dtype="bfloat16"),
    "pp2-zb-v-dp2-fp16": layout(1, 2, world=4, schedule="zb-v", dtype="float16"),
}


def world_of(options: Options, world: int) -> ParallelState:
    if world == 1:
        return single_process()
    return initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)


def fingerprint(trainer: Trainer) -> dict[str, Tensor]:
    """Every number that the run goes on from, on this rank."""
    found = {f"parameter/{shard.name}": param.detach().clone() for _, param, shard in named_shards(trainer.chunks)}
    return found | {f"{kind}/{name}": p.tensor.clone() for (name, kind), p in trainer.optimizer.state_pieces().items()}


def straight_and_resumed(options: Options, world: int, folder: Path, asynchronous: bool) -> list[str]:
    """Six steps, against three, a checkpoint, a new trainer, and three more. What differs?"""
    state = world_of(options, world)
    straight = Trainer(options, state, dataset())
    reports = [straight.step(step) for step in range(6)]
    first = Trainer(options, state, dataset())
    again: list[StepReport] = [first.step(step) for step in range(3)]
    writer = Writer(folder, state, asynchronous=asynchronous)
    save(writer, first, 3)
    first.step(3)  # what is written is the state of then, not of now
    writer.wait()
    second = Trainer(replace(options, seed=options.seed), state, dataset())
    loaded = resume(second, folder)
    assert loaded is not None
    assert loaded.step == 3
    again += [second.step(step) for step in range(loaded.step, 6)]
    faults = [f"{a} instead of {b}" for a, b in zip(again, reports, strict=True) if a != b]
    mine, expected = fingerprint(second), fingerprint(straight)
    faults += [name for name in expected if not torch.equal(mine[name], expected[name])]
    if second.optimizer.scalars() != straight.optimizer.scalars():
        faults.append(f"{second.optimizer.scalars()} instead of {straight.optimizer.scalars()}")
    return faults


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_is_the_same_to_the_bit(ranks: Any, tmp_path: Path, name: str) -> None:
    """CASE 43, with dropout on: losses, norms, learning rates, parameters and the optimizer's state on every rank."""
    world, options = LAYOUTS[name]
    asynchronous = "zero" in name
    if world == 1:
        assert straight_and_resumed(options, 1, tmp_path, asynchronous) == []
    else:
        assert ranks(world, straight_and_resumed, options, world, tmp_path, asynchronous) == [[]] * world


# ---- any layout from any other -----------------------------------------------------------------------------------------------

# One model, eight ways to lie: (world, options). float64 and without dropout, so that the next step can be compared.
MODEL = replace(SMALL, num_layers=4, optimizer="adamw")
WAYS = {
    "one": (1, MODEL),
    "tp4-pp2": (8, replace(MODEL, tensor_model_parallel_size=4, pipeline_model_parallel_size=2)),
    "tp2-pp2-dp2-zero": (
        8,
        replace(MODEL, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, use_distributed_optimizer=True),
    ),
    "pp2-n2": (2, replace(MODEL, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    "tp2": (2, replace(MODEL, tensor_model_parallel_size=2)),
    "pp4": (4, replace(MODEL, pipeline_model_parallel_size=4)),
    "dp4-zero": (4, replace(MODEL, use_distributed_optimizer=True)),
    "tp2-sp-dp2": (4, replace(MODEL, tensor_model_parallel_size=2, sequence_parallel=True)),
}


def write(options: Options, world: int, folder: Path) -> None:
    trainer = Trainer(options, world_of(options, world), dataset())
    for step in range(2):
        trainer.step(step)
    save(Writer(folder, trainer.state), trainer, 2)


def read_all(options: Options, world: int, folders: list[Path], out: Path) -> list[tuple[float, float]]:
    """Load each folder, save it again as this layout holds it, and take one more step: loss and norm."""
    outcomes = []
    for folder in folders:
        trainer = Trainer(replace(options, seed=99), world_of(options, world), dataset())
        trainer.options = options  # the data's seed is the same; the initial values were not
        loaded = resume(trainer, folder)
        assert loaded is not None
        save(Writer(out / folder.name, trainer.state), trainer, loaded.step)
        report = trainer.step(loaded.step)
        outcomes.append((report.loss, report.norm))
    return outcomes


def wholes(folder: Path) -> dict[str, Tensor]:
    place, manifest, _ = find(folder)
    return {name: whole(place, manifest, name) for name in manifest.tensors}


def on(ranks: Any, world: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if world == 1 else ranks(world, function, *args)


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_any_layout_loads_what_any_other_saved(ranks: Any, tmp_path: Path, count: int) -> None:
    """All ordered pairs, 64 in the soak: whole tensors bit-equal, moments included, and the next step the same within 1e-10."""
    ways = dict(list(WAYS.items())[:count])
    for name, (world, options) in ways.items():
        on(ranks, world, write, options, world, tmp_path / "saved" / name)
    folders = [tmp_path / "saved" / name for name in ways]
    saved = {folder.name: wholes(folder) for folder in folders}
    steps: dict[str, list[tuple[float, float]]] = {}
    for name, (world, options) in ways.items():
        results = on(ranks, world, read_all, options, world, folders, tmp_path / name)
        assert all(result == results[0] for result in results)
        for writer_name, outcome in zip(ways, results[0], strict=True):
            steps.setdefault(writer_name, []).append(outcome)
            mine = wholes(tmp_path / name / writer_name)
            assert mine.keys() == saved[writer_name].keys()
            assert all(torch.equal(mine[key], value) for key, value in saved[writer_name].items()), (writer_name, name)
    for outcomes in steps.values():
        for loss, norm in outcomes:
            assert (loss, norm) == pytest.approx(outcomes[0], abs=1e-10)


def test_the_vocabulary_is_stored_without_padding_and_names_are_global(ranks: Any, tmp_path: Path) -> None:
    """CASES 11, 14: 257 tokens over tp = 4 pad to 260; the checkpoint knows nothing of it."""
    options = replace(MODEL, vocab_size=257, tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    ranks(8, write, options, 8, tmp_path)
    found = wholes(tmp_path)
    assert found["parameter/embedding.word_embeddings.weight"].shape == (257, 16)
    assert {f"exp_avg/layers.{i}.mlp.linear_fc1.weight" for i in range(4)} <= found.keys()
    assert "parameter/output_layer.weight" not in found, "the tied copy is stored once"
    on(
        ranks,
        1,
        read_all,
        replace(options, tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
        1,
        [tmp_path],
        tmp_path / "o",
    )


def test_half_precision_and_full_read_each_other(tmp_path: Path) -> None:
    """float32 takes the main values of bf16, not their roundings; bf16 takes its main values from float32."""
    half, full = replace(MODEL, dtype="bfloat16"), replace(MODEL, dtype="float32")
    write(half, 1, tmp_path / "half")
    trainer = Trainer(full, single_process(), dataset())
    assert resume(trainer, tmp_path / "half") is not None
    saved, name = wholes(tmp_path / "half"), "layers.1.mlp.linear_fc1.weight"
    mine = full_state(trainer.chunks, trainer.state)[name]
    assert torch.equal(mine, saved[f"main/{name}"])
    assert not torch.equal(mine, saved[f"parameter/{name}"].float())
    write(full, 1, tmp_path / "full")
    trainer = Trainer(half, single_process(), dataset())
    assert resume(trainer, tmp_path / "full") is not None
    main = trainer.optimizer.state_pieces()[name, "main"].tensor
    assert torch.equal(main, wholes(tmp_path / "full")[f"parameter/{name}"])


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def perturbed(folder: Path) -> str:
    trainer = Trainer(replace(MODEL, pipeline_model_parallel_size=2), initialize_model_parallel(1, 2), dataset())
    trainer.step(0)
    save(Writer(folder, trainer.state), trainer, 1)  # sound
    if trainer.state.pp.rank == 1:
        next(param for _, param, shard in named_shards(trainer.chunks) if shard.tied_to).data[3, 1] += 1e-3
    with pytest.raises(CheckpointError) as error:
        save(Writer(folder, trainer.state), trainer, 2)
    return str(error.value)


def test_tied_copies_that_have_drifted_apart_are_not_saved(ranks: Any, tmp_path: Path) -> None:
    """CASE 17."""
    for message in ranks(2, perturbed, tmp_path):
        assert "the two copies of embedding.word_embeddings.weight differ by up to 1.0e-03" in message
    assert [path.name for path in sorted(tmp_path.glob("step-*")) if path.suffix != ".tmp"] == ["step-00000001"]


def test_another_model_is_named_with_all_that_differs_and_nothing_changes(tmp_path: Path) -> None:
    write(MODEL, 1, tmp_path)
    other = replace(MODEL, num_layers=5, num_attention_heads=2, untie_embeddings_and_output_weights=True)
    trainer = Trainer(other, single_process(), dataset())
    before = fingerprint(trainer)
    with pytest.raises(CheckpointError) as error:
        resume(trainer, tmp_path)
    message = str(error.value)
    for words in (
        "num_layers is 4 in the checkpoint and 5 here",
        "num_attention_heads is 4",
        "tied is True",
        "layers.4.",
        "output_layer.weight",
    ):
        assert words in message, words
    assert all(torch.equal(value, before[name]) for name, value in fingerprint(trainer).items())


def test_a_folder_without_a_checkpoint_is_a_new_start(tmp_path: Path) -> None:
    trainer = Trainer(MODEL, single_process(), dataset())
    assert resume(trainer, tmp_path / "nowhere") is None
    assert resume(trainer, tmp_path) is None
    assert {entry.kind for entry in entries_of(trainer)} == {"parameter", "exp_avg", "exp_avg_sq"}
    assert "hidden_dropout" not in about(trainer)


def test_what_keeps_a_run_from_going_on_unchanged_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another seed or batch size reads other samples; a checkpoint without moments starts the optimizer anew; no step may be left."""
    here = single_process()
    first = Trainer(DROPOUT, here, dataset())
    first.step(0)
    save(Writer(tmp_path / "sgd", here), Trainer(replace(DROPOUT, optimizer="sgd"), here, dataset()), 2)
    save(Writer(tmp_path / "adamw", here), first, 6)
    other = replace(DROPOUT, seed=DROPOUT.seed + 1, global_batch_size=16)

    def told(options: Options, folder: str) -> list[str]:
        trainer = Trainer(options, here, dataset())
        loaded = resume(trainer, tmp_path / folder)
        assert loaded is not None
        return changes(trainer, loaded)

    assert told(replace(DROPOUT, train_iters=7), "adamw") == []
    assert told(DROPOUT, "adamw") == ["no step is left: --train-iters is 6"]
    assert told(DROPOUT, "sgd") == ["the checkpoint holds no exp_avg, exp_avg_sq; the optimizer starts anew"]
    assert told(replace(other, train_iters=7), "adamw") == [
        f"it was saved with --seed {DROPOUT.seed} and goes on with --seed {other.seed}: the order of the data changes",
        "it was saved with --global-batch-size 8 and goes on with --global-batch-size 16: the order of the data changes",
    ]


def test_a_finished_run_started_again_trains_nothing_and_concludes(tmp_path: Path) -> None:
    """With everything that follows the last step: sample, loss curve, records."""
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --eval-iters 1 --train-iters 2"
    command = [sys.executable, "-m", "minimeg.train", *flags.split(), "--save", "run", "--load", "run"]
    command += ["--sample", "20", "--loss-curve", "loss.png", "--run-dir", "record", "--trace", "trace.svg"]
    done = [
        subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=60, check=False
        )
        for _ in range(2)
    ]
    assert [each.returncode for each in done] == [0, 0], done[1].stderr
    assert "note: no step is left: --train-iters is 2" in done[1].stdout
    samples = [each.stdout.partition("a sample of")[2].split("-" * 72)[1] for each in done]
    assert samples[0] == samples[1]
