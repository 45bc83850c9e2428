"""CASE 55: every reason not to start, found at once, named by field with a legal value, before any process or group exists."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimeg import train
from minimeg.arguments import parse, parser
from minimeg.data import VOCAB_SIZE
from minimeg.options import SCHEDULES, Options

# What forbids a run: number of processes, options, and words that the message must hold: the field, its value, a legal one.
BAD: list[tuple[int, dict[str, Any], list[str]]] = [
    # heads and hidden size
    (1, {"num_attention_heads": 3}, ["num_attention_heads=3", "hidden_size=64", "[1, 2, 4, 8, 16, 32, 64]"]),
    (1, {"num_attention_heads": 0}, ["num_attention_heads=0", "at least 1"]),
    (1, {"hidden_size": 66}, ["num_attention_heads=4", "hidden_size=66", "[1, 2, 3, 6, 11, 22, 33, 66]"]),
    (1, {"hidden_size": -8}, ["hidden_size=-8", "at least 1"]),
    (3, {"tensor_model_parallel_size": 3}, ["num_attention_heads=4", "tp=3", "legal tp: [1, 2, 4]"]),
    (3, {"tensor_model_parallel_size": 3, "num_attention_heads": 3, "hidden_size": 65}, ["ffn_hidden_size=260", "tp=3"]),
    (
        3,
        {"tensor_model_parallel_size": 3, "num_attention_heads": 28, "hidden_size": 56},
        ["num_attention_heads=28", "legal tp: [1, 2, 4, 7, 14, 28]"],
    ),
    # layers
    (1, {"num_layers": 0}, ["num_layers=0", "at least 1"]),
    (8, {"pipeline_model_parallel_size": 8}, ["num_layers=4", "8 pipeline chunks", "at least 8 layers"]),
    (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
        ["num_layers=4", "6 pipeline chunks (pp x vpp)", "at least 6"],
    ),
    (2, {"pipeline_model_parallel_size": 2, "num_layers": 3, "schedule": "zb-v"}, ["num_layers=3", "at least 4"]),
    # sequence
    (1, {"seq_length": 0}, ["seq_length=0", "at least 1"]),
    (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 63},
        ["sequence_parallel", "seq_length=63", "tp=2", "use 64"],
    ),
    # number of processes
    (6, {"tensor_model_parallel_size": 4}, ["world_size=6", "tp=4", "world_size=4 or 8"]),
    (1, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, ["world_size=1", "tp=2", "pp=2", "4"]),
    (6, {"pipeline_model_parallel_size": 4}, ["world_size=6", "pp=4", "pp=1, 2, 3 or 6"]),
    (0, {}, ["world_size=0", "use 1"]),
    (1, {"tensor_model_parallel_size": 0}, ["tensor_model_parallel_size=0", "at least 1"]),
    (1, {"tensor_model_parallel_size": -2}, ["tensor_model_parallel_size=-2", "at least 1"]),
    (1, {"pipeline_model_parallel_size": 0}, ["pipeline_model_parallel_size=0", "at least 1"]),
    (1, {"virtual_pipeline_model_parallel_size": 0}, ["virtual_pipeline_model_parallel_size=0", "at least 1"]),
    (2, {"context_parallel_size": 2}, ["context_parallel_size=2", "not built yet", "use 1"]),
    (2, {"context_parallel_size": 0}, ["context_parallel_size=0", "at least 1"]),
    # batch
    (1, {"global_batch_size": 15}, ["global_batch_size 15", "micro_batch_size 2", "14 or 16"]),
    (1, {"global_batch_size": 0}, ["global_batch_size", "0", "at least 1"]),
    (1, {"micro_batch_size": 0}, ["micro_batch_size", "0", "at least 1"]),
    (1, {"micro_batch_size": 3}, ["global_batch_size 16", "micro_batch_size 3", "15 or 18"]),
    (16, {}, ["global_batch_size 16", "dp_size 16", "nearest: 32"]),
    (6, {"pipeline_model_parallel_size": 2}, ["global_batch_size 16", "dp_size 3", "12 or 18"]),
    # schedules
    (1, {"schedule": "2f2b"}, ["schedule=2f2b", *SCHEDULES]),
    (1, {"schedule": "pipedream"}, ["schedule=pipedream is not for training", "1f1b"]),
    (1, {"schedule": "forward-only"}, ["schedule=forward-only is not for training", "gpipe"]),
    (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "schedule": "1f1b"},
        ["virtual_pipeline_model_parallel_size=2", "schedule=1f1b has one chunk", "--vpp 1", "interleaved"],
    ),
    (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "schedule": "zb-h1"},
        ["virtual_pipeline_model_parallel_size=2", "schedule=zb-h1 has one chunk"],
    ),
    (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3, "schedule": "zb-v", "num_layers": 6},
        ["virtual_pipeline_model_parallel_size=3", "schedule=zb-v has two chunks", "--vpp 2"],
    ),
    # numbers of the optimizer
    (1, {"lr": 0.0}, ["lr=0.0", "positive", "0.001"]),
    (1, {"lr": float("nan")}, ["lr=nan", "positive"]),
    (1, {"lr": float("inf")}, ["lr=inf", "positive"]),
    (1, {"lr": -1.0}, ["lr=-1.0", "positive"]),
    (1, {"min_lr": 1.0}, ["min_lr=1.0", "lr=0.001", "at most 0.001"]),
    (1, {"min_lr": -1.0}, ["min_lr=-1.0", "at least 0"]),
    (1, {"weight_decay": -0.1}, ["weight_decay=-0.1", "at least 0"]),
    (1, {"weight_decay": float("nan")}, ["weight_decay=nan", "at least 0"]),
    (1, {"clip_grad": -1.0}, ["clip_grad=-1.0", "at least 0"]),
    (1, {"train_iters": 0}, ["train_iters=0", "at least 1"]),
    (1, {"lr_warmup_iters": -1}, ["lr_warmup_iters=-1", "at least 0"]),
    (1, {"lr_warmup_iters": 101}, ["lr_warmup_iters=101", "train_iters=100", "at most 100"]),
    (1, {"optimizer": "lion"}, ["optimizer=lion", "adamw, sgd"]),
    (1, {"dtype": "int8"}, ["dtype=int8", "float32, float64, bfloat16"]),
    (1, {"device": "tpu"}, ["device=tpu", "auto, cpu, cuda"]),
    (1, {"timeout": 0.0}, ["timeout=0.0", "positive", "60"]),
    (1, {"timeout": float("inf")}, ["timeout=inf", "positive"]),
    # dropouts
    (1, {"hidden_dropout": 1.0}, ["hidden_dropout=1.0", "[0, 1)", "0.1"]),
    (1, {"hidden_dropout": float("nan")}, ["hidden_dropout=nan", "[0, 1)"]),
    (1, {"attention_dropout": -0.1}, ["attention_dropout=-0.1", "[0, 1)"]),
    (
        2,
        {"tensor_model_parallel_size": 2, "attention_dropout": 0.1, "compare_with_single_process": True},
        ["compare_with_single_process", "tp=2", "attention_dropout=0.1", "--attention-dropout 0", "--whole-dropout-masks"],
    ),
    (
        2,
        {
            "tensor_model_parallel_size": 2, "sequence_parallel": True, "hidden_dropout": 0.2,
            "compare_with_single_process": True,
        },
        ["compare_with_single_process", "sequence_parallel", "hidden_dropout=0.2", "--hidden-dropout 0"],
    ),
    # recomputation
    (1, {"recompute_granularity": "some"}, ["recompute_granularity=some", "full, selective"]),
    (1, {"recompute_granularity": "full", "recompute_method": "rows"}, ["recompute_method=rows", "uniform, block"]),
    (1, {"recompute_granularity": "full", "recompute_num_layers": 0}, ["recompute_num_layers=0", "1..4"]),
    (1, {"recompute_granularity": "full", "recompute_num_layers": 5}, ["recompute_num_layers=5", "1..4"]),
    (1, {"recompute_method": "block"}, ["recompute_method=block", "recompute_granularity=full"]),
    (1, {"recompute_granularity": "selective", "recompute_num_layers": 2}, ["recompute_num_layers=2", "recompute_granularity=full"]),
    (1, {"recompute_granularity": "selective", "recompute_modules": ("moe",)}, ["recompute_modules=moe", "core_attn, mlp, layernorm"]),
    (1, {"recompute_granularity": "full", "recompute_modules": ("mlp",)}, ["recompute_modules=mlp", "recompute_granularity=selective"]),
    (1, {"recompute_granularity": "full", "recompute_keep_microbatches": -1}, ["recompute_keep_microbatches=-1", "at least 0"]),
    (1, {"recompute_keep_microbatches": 2}, ["recompute_keep_microbatches=2", "recompute_granularity"]),
    (2, {"tensor_model_parallel_size": 2, "distribute_saved_activations": True}, ["distribute_saved_activations", "granularity=full"]),
    (1, {"recompute_granularity": "full", "distribute_saved_activations": True}, ["distribute_saved_activations", "tp=1"]),
    (
        2,
        {
            "tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full",
            "distribute_saved_activations": True,
        },
        ["distribute_saved_activations", "sequence_parallel"],
    ),
    (1, {"check_recompute": True}, ["check_recompute", "full or selective"]),
    # output
    (1, {"eval_iters": 0}, ["eval_iters=0", "at least 1"]),
    (1, {"eval_interval": -1}, ["eval_interval=-1", "at least 0"]),
    (1, {"log_interval": 0}, ["log_interval=0", "at least 1"]),
    (1, {"sample": -1}, ["sample=-1", "at least 0"]),
]  # fmt: skip


def name_of(case: Any) -> str:
    world, options, _ = case
    return f"{world}:" + ",".join(f"{name}={value}" for name, value in options.items())


@pytest.fixture
def nothing_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process or a group was about to be made")

    for module, name in (
        (dist, "init_process_group"), (dist, "new_group"), (dist, "TCPStore"), (os, "fork"), (os, "posix_spawn"),
        (torch.multiprocessing, "spawn"), (train, "initialize_model_parallel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fail)


def arguments_of(options: dict[str, Any]) -> list[str]:
    """The command line that gives these options."""
    found = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, tuple):
            found += [flag, *value]
            continue
        found += [flag] if value is True else [f"{flag}={value}"]
    return found


@pytest.mark.parametrize("case", BAD, ids=map(name_of, BAD))
def test_a_bad_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nothing_may_start: None, case: Any
) -> None:
    """CASE 55, through the program itself: exit code 2 and one message, in less than a second."""
    world, options, words = case
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    choice = any(f"argument --{name}" in _choices() for name in options)
    began = time.perf_counter()
    if choice:  # argparse itself knows the choices, and exits
        with pytest.raises(SystemExit) as caught:
            train.main(arguments_of(options))
        code = caught.value.code
    else:
        code = train.main(arguments_of(options))
    assert time.perf_counter() - began < 1
    said = capsys.readouterr().err
    assert code == 2
    faults = Options(**options).faults(world)
    assert faults
    for word in words:
        assert any(word in fault for fault in faults), (word, faults)
        assert choice or word in said
    assert len(set(faults)) == len(faults), "each fault once"


def _choices() -> list[str]:
    return [f"argument {action.option_strings[0]}" for action in parser()._actions if action.choices]


def test_there_are_enough_bad_configurations() -> None:
    assert len(BAD) >= 40


def test_all_faults_come_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nothing_may_start: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    arguments = (
        f"--tp 4 --num-attention-heads 6 --num-layers 1 --pp 2 --lr 0 --hidden-dropout 2 --clip-grad -1 --log-interval 0 "
        f"--schedule zigzag --cp 3 --data-path {tmp_path / 'nowhere'}"
    ).split()
    assert train.main(arguments) == 2
    said = capsys.readouterr().err
    for word in (
        "lr=0.0", "clip_grad=-1.0", "hidden_dropout=2.0", "log_interval=0", "context_parallel_size=3", "schedule=zigzag",
        "num_attention_heads=6 must divide hidden_size=64", "num_attention_heads=6 must be a multiple of tp=4",
        "num_layers=1", "world_size=6", "nowhere",
    ):  # fmt: skip
        assert word in said
    assert said.startswith("minimeg.train: error: this run cannot start:\n  ")


def test_only_one_rank_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nothing_may_start: None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "3")
    assert train.main(["--tp", "4"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "two"], ["--tensor-model-parallel-size/--tp", "'two'"]),
        (["--lr", "fast"], ["--lr", "'fast'"]),
        (["--dtype", "float8"], ["--dtype", "float32", "float64", "bfloat16"]),
        (["--optimizer", "lion"], ["--optimizer", "adamw", "sgd"]),
        (["--device", "tpu"], ["--device", "auto", "cpu", "cuda"]),
        (["--tensor-model", "2"], ["unrecognized arguments", "--tensor-model"]),
        (["--micro-batchsize", "2"], ["unrecognized arguments"]),
        (["--tp"], ["--tp", "expected one argument"]),
        (["--data-path"], ["--data-path", "expected at least one argument"]),
    ],
)
def test_bad_flags_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], nothing_may_start: None, arguments: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


# ---- what is accepted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {}),
        (2, {}),
        (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"pipeline_model_parallel_size": 4}),
        (1, {"lr": 0.1, "min_lr": 0.1, "lr_warmup_iters": 100, "clip_grad": 0.0, "weight_decay": 0.0, "seed": -5}),
        (1, {"vpp": 4}),
        (2, {"pipeline_model_parallel_size": 2, "vpp": 2, "schedule": "interleaved"}),
        (2, {"pipeline_model_parallel_size": 2, "schedule": "zb-v"}),
        (2, {"pipeline_model_parallel_size": 2, "vpp": 2, "schedule": "zb-v"}),
        (3, {"pipeline_model_parallel_size": 3, "num_layers": 5}),
        (5, {"global_batch_size": 5, "micro_batch_size": 1}),
        (2, {"tensor_model_parallel_size": 2, "attention_dropout": 0.1}),
        (2, {"tensor_model_parallel_size": 2, "hidden_dropout": 0.1, "compare_with_single_process": True}),
        (
            2,
            {
                "tensor_model_parallel_size": 2, "attention_dropout": 0.1, "hidden_dropout": 0.1,
                "sequence_parallel": True, "whole_dropout_masks": True, "compare_with_single_process": True,
            },
        ),
        (1, {"recompute_granularity": "full", "recompute_num_layers": 3, "check_recompute": True}),
        (
            2,
            {
                "tensor_model_parallel_size": 2, "recompute_granularity": "full", "recompute_method": "block",
                "distribute_saved_activations": True, "recompute_keep_microbatches": 2,
            },
        ),
        (1, {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")}),
        (1, {"attention_dropout": 0.1, "sequence_parallel": True, "hidden_dropout": 0.1, "compare_with_single_process": True}),
    ],
)  # fmt: skip
def test_good_configurations_have_no_fault(world: int, options: dict[str, Any]) -> None:
    if "vpp" in options:
        options["virtual_pipeline_model_parallel_size"] = options.pop("vpp")
    assert Options(**options).faults(world) == []


def test_any_vocabulary_is_legal() -> None:
    """It is padded inside, so no t is refused for it: 256 bytes over 7 ranks."""
    assert VOCAB_SIZE % 7
    assert Options(tensor_model_parallel_size=7, num_attention_heads=7, hidden_size=56).faults(7) == []


def test_flags_and_aliases_fill_the_options() -> None:
    assert parse([]) == Options()
    long = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --virtual-pipeline-model-parallel-size 4 "
        "--context-parallel-size 5 --sequence-parallel --data-path a b --trace t.svg --lr 0.5 --dtype float64 --seed 9"
    )
    short = "--tp 2 --pp 3 --vpp 4 --cp 5 --sequence-parallel --data-path a b --trace t.svg --lr 0.5 --dtype float64 --seed 9"
    options = parse(long.split())
    assert options == parse(short.split())
    assert options == Options(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=3, virtual_pipeline_model_parallel_size=4,
        context_parallel_size=5, sequence_parallel=True, data_path=("a", "b"), trace=Path("t.svg"), lr=0.5,
        dtype="float64", seed=9,
    )  # fmt: skip
    recompute = "--recompute-granularity selective --recompute-modules mlp layernorm --check-recompute"
    assert parse(recompute.split()) == Options(
        recompute_granularity="selective", recompute_modules=("mlp", "layernorm"), check_recompute=True
    )
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert {"--" + field.name.replace("_", "-") for field in fields(Options)} <= flags, "every option has its flag"


def test_names_follow_from_the_layout() -> None:
    assert Options().schedule_name == "1f1b"
    assert Options(virtual_pipeline_model_parallel_size=2).schedule_name == "interleaved"
    assert Options(schedule="zb-h1").schedule_name == "zb-h1"
    options = Options(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, global_batch_size=24)
    assert options.data_parallel_size(12) == 3
    assert options.microbatches(12) == 4
    assert (options.training_schedule(12).stages, options.training_schedule(12).microbatches) == (2, 4)
    placed = Options(pipeline_model_parallel_size=2, schedule="zb-v")
    everything = replace(
        options, sequence_parallel=True, schedule="gpipe", recompute_granularity="full", recompute_method="block",
        recompute_num_layers=2, recompute_modules=("mlp",), recompute_keep_microbatches=1,
        distribute_saved_activations=True, check_recompute=True,
    )  # fmt: skip
    assert everything.in_one_process() == Options(global_batch_size=24)
    training, evaluation = placed.training_schedule(2), placed.evaluation_schedule(2)
    assert (evaluation.placement, evaluation.chunks) == (training.placement, training.chunks) == ("v", 2)
    assert {action.kind for rank in evaluation.ranks for action in rank} == {"F"}
    config = Options(hidden_size=32, untie_embeddings_and_output_weights=True, seq_length=5).config
    assert (config.hidden_size, config.tied, config.max_sequence_length, config.vocab_size) == (
        32,
        False,
        5,
        VOCAB_SIZE,
    )
