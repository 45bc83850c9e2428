"""The flags of ``python -m minimeg.train``, and every reason to refuse them, found before any process group exists.

The names are Megatron-LM's where it has one, each with a short alias. :func:`parse` returns :class:`Options`; :meth:`Options.faults`
lists all that is wrong with a layout at once, each sentence naming the field, the values and a legal alternative.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minimeg.data import VOCAB_SIZE, microbatch_count
from minimeg.grid import Grid
from minimeg.models.gpt import GPTConfig
from minimeg.schedule import Schedule, build, forward_only

DTYPES = ("float32", "float64", "bfloat16")
OPTIMIZERS = ("adamw", "sgd")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
# Flags of rooms that are not built yet: known by name, so that they are refused by name and never silently ignored.
NOT_BUILT = {
    "--recompute-granularity": "activation recomputation in train.py",
    "--recompute-method": "activation recomputation in train.py",
    "--recompute-num-layers": "activation recomputation in train.py",
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--save-interval": "checkpoints",
}


@dataclass(frozen=True)
class Options:
    """What a run is told. Field names are the flags' with underscores."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    schedule: str | None = None
    num_layers: int = 4
    hidden_size: int = 64
    num_attention_heads: int = 4
    seq_length: int = 64
    micro_batch_size: int = 2
    global_batch_size: int = 16
    train_iters: int = 100
    lr: float = 3e-3
    min_lr: float = 3e-4
    lr_warmup_iters: int = 10
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    optimizer: str = "adamw"
    seed: int = 1234
    data_path: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "float32"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    whole_dropout_masks: bool = False
    untie_embeddings_and_output_weights: bool = False
    eval_interval: int = 0
    eval_iters: int = 4
    log_interval: int = 10
    timeout: float = 60.0
    compare_with_single_process: bool = False
    trace: Path | None = None
    loss_curve: Path | None = None
    sample: int = 0

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=self.seq_length,
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
            tied=not self.untie_embeddings_and_output_weights,
            sequence_parallel=self.sequence_parallel,
            whole_dropout_masks=self.whole_dropout_masks,
        )

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_pipeline_model_parallel_size > 1 else "1f1b")

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    def microbatches(self, world_size: int) -> int:
        """m: micro-batches of one data-parallel rank in a step."""
        return microbatch_count(self.global_batch_size, self.micro_batch_size, self.data_parallel_size(world_size))

    def training_schedule(self, world_size: int) -> Schedule:
        p, n = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        return build(self.schedule_name, p, self.microbatches(world_size), chunks=n)

    def evaluation_schedule(self, world_size: int) -> Schedule:
        """Forwards only, through the chunks where the training schedule placed them."""
        training = self.training_schedule(world_size)
        return forward_only(training.stages, training.microbatches, training.chunks, placement=training.placement)

    def faults(self, world_size: int) -> list[str]:
        """Everything that forbids this run on ``world_size`` processes; an empty list means that it can start."""
        unschedulable = self._schedule_faults()
        found = [*self._value_faults(), *unschedulable, *self._comparison_faults()]
        t, p, n = (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size,
        )
        if min(t, p, n, self.context_parallel_size) < 1:
            return found  # already named; nothing can be divided by them
        chunks = 2 if self.schedule_name == "zb-v" else n
        # The model's name for the longest sequence is not the flag's.
        found += [fault.replace("max_sequence_length", "seq_length") for fault in self.config.faults(t, p * chunks)]
        layout = _fault_of(lambda: Grid(world_size, tp=t, cp=self.context_parallel_size, pp=p))
        found += layout
        if not layout:
            batch = _fault_of(lambda: self.microbatches(world_size))
            found += batch
            if not batch and not unschedulable:
                found += _fault_of(lambda: self.training_schedule(world_size))
        return found

    def _value_faults(self) -> list[str]:
        found = []
        positive = (
            "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
            "context_parallel_size train_iters log_interval eval_iters"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("eval_interval", "lr_warmup_iters", "sample"):
            if getattr(self, name) < 0:
                found.append(f"{name}={getattr(self, name)} must be at least 0")
        for name in ("min_lr", "weight_decay", "clip_grad"):
            if not 0 <= getattr(self, name) < float("inf"):
                found.append(f"{name}={getattr(self, name)} must be a number of at least 0, e.g. 0.1")
        for name in ("lr", "timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                found.append(f"{name}={getattr(self, name)} must be a positive number, e.g. {getattr(Options, name)}")
        for name, legal in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("device", DEVICES)):
            if getattr(self, name) not in legal:
                found.append(f"{name}={getattr(self, name)} is unknown; use one of {', '.join(legal)}")
        if self.min_lr > self.lr > 0:
            found.append(f"min_lr={self.min_lr} exceeds lr={self.lr}; use at most {self.lr}")
        if self.lr_warmup_iters > self.train_iters > 0:
            found.append(
                f"lr_warmup_iters={self.lr_warmup_iters} exceeds train_iters={self.train_iters}; use at most {self.train_iters}"
            )
        if self.context_parallel_size > 1:
            found.append(f"context_parallel_size={self.context_parallel_size}: its attention is not built yet; use 1")
        return found

    def _schedule_faults(self) -> list[str]:
        name, n = self.schedule_name, self.virtual_pipeline_model_parallel_size
        if name not in SCHEDULES:
            return [f"schedule={name} is not for training; use one of {', '.join(SCHEDULES)}"]
        field = f"virtual_pipeline_model_parallel_size={n}"
        if name == "zb-v" and n > 2:
            return [f"{field}: schedule={name} has two chunks a rank; use --vpp 2 or --schedule interleaved"]
        if n > 1 and name not in ("interleaved", "zb-v"):
            return [f"{field}: schedule={name} has one chunk a rank; use --vpp 1 or --schedule interleaved"]
        return []

    def _comparison_faults(self) -> list[str]:
        """Dropout masks that depend on the tensor-parallel index have no twin in one process."""
        if not self.compare_with_single_process or self.whole_dropout_masks:
            return []
        found = []
        if self.tensor_model_parallel_size > 1 and self.attention_dropout > 0:
            found.append(
                f"compare_with_single_process with tp={self.tensor_model_parallel_size} and attention_dropout="
                f"{self.attention_dropout}: the masks differ by tp index; use --attention-dropout 0, --tp 1 or --whole-dropout-masks"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size > 1 and self.hidden_dropout > 0:
            found.append(
                f"compare_with_single_process with sequence_parallel and hidden_dropout={self.hidden_dropout}: the masks differ by "
                "tp index; use --hidden-dropout 0, no --sequence-parallel, or --whole-dropout-masks"
            )
        return found


def _fault_of(attempt: Callable[[], object]) -> list[str]:
    try:
        attempt()
    except ValueError as error:
        return [str(error)]
    return []


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m minimeg.train",
        description="Train a GPT on text over tensor, pipeline and data parallelism. Several processes: "
        "python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    default = Options()

    def add(section: argparse._ArgumentGroup, flag: str, help: str, *aliases: str, **more: object) -> None:
        value = getattr(default, flag[2:].replace("-", "_"))
        if isinstance(value, bool):
            section.add_argument(flag, *aliases, help=help, action="store_true")
        else:
            kind = {"type": type(value), "default": value, "metavar": "N" if isinstance(value, int) else None}
            section.add_argument(flag, *aliases, help=help, **{**kind, **more})

    layout = result.add_argument_group("layout (the data-parallel size is what remains of the processes)")
    add(layout, "--tensor-model-parallel-size", "t", "--tp")
    add(layout, "--pipeline-model-parallel-size", "p", "--pp")
    add(layout, "--virtual-pipeline-model-parallel-size", "n, chunks of layers a rank", "--vpp")
    add(layout, "--context-parallel-size", "c (1 until its attention is built)", "--cp")
    add(layout, "--sequence-parallel", "cut norms, dropouts and residuals along the sequence")
    add(layout, "--schedule", "pipeline schedule; default 1f1b, with --vpp interleaved", type=str, metavar="NAME")

    model = result.add_argument_group("model")
    add(model, "--num-layers", "L")
    add(model, "--hidden-size", "h")
    add(model, "--num-attention-heads", "a")
    add(model, "--seq-length", "s")
    add(model, "--hidden-dropout", "after embedding, attention and MLP")
    add(model, "--attention-dropout", "of attention probabilities")
    add(model, "--whole-dropout-masks", "draw each mask for the full tensor, so that any layout equals one process")
    add(model, "--untie-embeddings-and-output-weights", "give the head a weight of its own")
    add(model, "--dtype", "of parameters and activations", choices=DTYPES, metavar=None)

    training = result.add_argument_group("training")
    add(training, "--micro-batch-size", "b: samples of one forward pass")
    add(training, "--global-batch-size", "samples of one optimizer step, over all ranks")
    add(training, "--train-iters", "optimizer steps")
    add(training, "--lr", "highest learning rate")
    add(training, "--min-lr", "learning rate at the end of the cosine")
    add(training, "--lr-warmup-iters", "steps of linear warm-up")
    add(training, "--weight-decay", "of matrices; biases and norms have none")
    add(training, "--clip-grad", "largest norm of all gradients together; 0: never clip")
    add(training, "--optimizer", "update rule", choices=OPTIMIZERS, metavar=None)
    add(training, "--seed", "of initial values, data order and dropout")
    add(
        training,
        "--data-path",
        "files or folders of text; default: Python's standard library",
        nargs="+",
        type=str,
        metavar="PATH",
    )
    add(training, "--device", "auto: a GPU if there is one", choices=DEVICES, metavar=None)
    add(training, "--timeout", "seconds until a waiting rank gives up", metavar="S")

    output = result.add_argument_group("output")
    add(output, "--log-interval", "steps between two lines of a log")
    add(output, "--eval-interval", "steps between two validations; 0: only at the end")
    add(output, "--eval-iters", "batches of a validation")
    add(
        output,
        "--compare-with-single-process",
        "repeat the run in one process and compare: PASS, or FAIL and exit code 1",
    )
    add(output, "--trace", "draw the measured timeline of a step above the simulated one", type=Path, metavar="SVG")
    add(output, "--loss-curve", "draw the losses", type=Path, metavar="PNG")
    add(output, "--sample", "print as many characters written by the trained model")

    later = result.add_argument_group("not built yet (refused)")
    for flag, room in NOT_BUILT.items():
        later.add_argument(flag, help=room, default=argparse.SUPPRESS, metavar="X")
    return result


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line. Like argparse, it prints what is wrong and exits with code 2."""
    the_parser = parser()
    values = vars(the_parser.parse_args(arguments))
    unbuilt = [flag for flag in NOT_BUILT if flag[2:].replace("-", "_") in values]
    if unbuilt:
        the_parser.error("; ".join(f"{flag}: {NOT_BUILT[flag]} is not built yet, leave it out" for flag in unbuilt))
    values["data_path"] = tuple(values["data_path"])
    return Options(**values)
