"""One rank of a world on paper counts what a rank of the real world counts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from minimeg import train
from minimeg.comm import ledger
from minimeg.dry_run import DryRun, comparison, dry_run, imagine, report
from minimeg.ledger import Record
from minimeg.memory import activation_memory
from minimeg.options import Options
from minimeg.parallel_state import initialize_model_parallel
from minimeg.trainer import Trainer
from tests.test_trainer import dataset

SMALL = Options(
    num_layers=8,
    hidden_size=16,
    num_attention_heads=4,
    seq_length=16,
    micro_batch_size=1,
    global_batch_size=16,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    dtype="bfloat16",
)
LAYOUTS = {
    "tp2-pp2-dp2": replace(SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp4-dp2-sp": replace(SMALL, tensor_model_parallel_size=4, sequence_parallel=True),
    "pp4-dp2-untied": replace(SMALL, pipeline_model_parallel_size=4, untie_embeddings_and_output_weights=True),
    "tp2-sp-pp4": replace(SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=4, sequence_parallel=True),
    "pp2-n2-dp4": replace(SMALL, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "tp2-pp4-zb-h1": replace(SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=4, schedule="zb-h1"),
    "dp8": SMALL,
    "tp2-dp4-zero": replace(SMALL, tensor_model_parallel_size=2, use_distributed_optimizer=True),
    "tp2-pp2-dp2-full": replace(
        SMALL,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    ),
}


def really(options: Options) -> tuple[list[Record], int]:
    """The ledger of a real step on this rank, and the bytes of activations at its peak, statistics apart."""
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, dataset())
    with activation_memory() as memory, ledger() as book:
        trainer.step(0)
    return book.records, memory.peak - memory.statistics()


def imagined(options: Options, rank: int, world_size: int = 8) -> DryRun:
    with imagine(options, rank, world_size) as state:
        return dry_run(options, state, dataset())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_ledger_of_a_dry_run_is_that_of_a_real_one(ranks: Any, name: str) -> None:
    real = ranks(8, really, LAYOUTS[name])
    for rank in (0, 3, 7):
        run = imagined(LAYOUTS[name], rank)
        records, peak = real[rank]
        assert run.book.records == records
        # The CPU's norms keep their statistics in 16 bits, meta's and a GPU's in 32; and a real window is s + 1 tokens of 8 bytes.
        assert 0 <= peak - (run.activations - run.statistics) <= 8 * LAYOUTS[name].global_batch_size
    assert not dist.is_initialized(), "the imagined world is gone"


@pytest.mark.parametrize("name", ["tp2-pp2-dp2", "tp2-sp-pp4", "pp2-n2-dp4", "tp2-dp4-zero"])
@pytest.mark.parametrize("rank", [0, 2, 7])
def test_what_is_counted_is_what_the_papers_say(name: str, rank: int) -> None:
    run = imagined(LAYOUTS[name], rank)
    for what, counted, formula in comparison(run):
        if formula is not None and "activations" not in what:
            assert counted == pytest.approx(formula, rel=1e-12), what
    text = report(run)
    assert text.startswith(f"rank {rank} of 8: tp=")
    assert "parameters" in text


def test_activations_of_a_middle_stage_are_exactly_those_of_the_formula() -> None:
    options = replace(SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=4, sequence_parallel=True)
    found = {what: (counted, formula) for what, counted, formula in comparison(imagined(options, 2))}
    counted, formula = found["activations at the peak (formula: of the layers), bytes"]
    assert counted == formula


def test_the_trillion_parameter_model_on_3072_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Narayanan et al. 2021, Table 1, last row; here with 64 of the 512 micro-batches. In under 60 s with all of them: see `soak`."""
    trillion(global_batch_size=6 * 64)
    said = capsys.readouterr().out
    assert "rank 515 of 3072: tp=3/8 cp=0/1 ep=0/1 dp=4/6 pp=10/64" in said
    assert said.count("1,966,432,000") == 2


@pytest.mark.soak
def test_the_whole_batch_of_the_trillion_parameter_model_takes_less_than_a_minute() -> None:
    start = time.perf_counter()
    trillion(global_batch_size=3072)
    assert time.perf_counter() - start < 60


def trillion(global_batch_size: int) -> None:
    flags = (
        "--dry-run --world-size 3072 --rank 515 --tp 8 --pp 64 --num-layers 128 --hidden-size 25600 --num-attention-heads 160 "
        f"--seq-length 2048 --vocab-size 51200 --micro-batch-size 1 --global-batch-size {global_batch_size} --dtype bfloat16"
    )
    assert train.main(flags.split()) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dry-run", "world_size=None must be at least 1 in a dry run"),
        ("--dry-run --world-size 4 --rank 4", "rank=4 must lie in 0..3"),
        ("--world-size 4", "world_size is for --dry-run"),
        ("--dry-run --world-size 12 --tp 5", "tp=5"),
        ("--vocab-size 100", "vocab_size=100 is less than the 256 bytes"),
    ],
)
def test_bad_flags_are_named(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    assert train.main(flags.split()) == 2
    assert words in capsys.readouterr().err
