"""The flags of ``python -m minimeg.train``: Megatron-LM's names where it has one, each with a short alias.

:func:`parse` returns :class:`~minimeg.options.Options`, which knows what is legal.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimeg.options import DEVICES, DTYPES, ON_NONFINITE, OPTIMIZERS, Options


class Flag:
    """One flag of the command line; type and default are those of the field of Options that has its name."""

    def __init__(self, name: str, help: str, alias: str | None = None, **settings: Any) -> None:
        self.names = [name] if alias is None else [name, alias]
        default = getattr(Options(), name[2:].replace("-", "_"))
        metavar = "N" if isinstance(default, int) else "X" if isinstance(default, float) else None
        kind: dict[str, Any] = {"type": type(default), "default": default, "metavar": metavar}
        if isinstance(default, bool):
            kind = {"action": "store_true"}
        self.settings = {"help": help, **kind, **settings}


SECTIONS: dict[str, list[Flag]] = {
    "layout (the data-parallel size is what remains of the processes)": [
        Flag("--tensor-model-parallel-size", "t", "--tp"),
        Flag("--pipeline-model-parallel-size", "p", "--pp"),
        Flag("--virtual-pipeline-model-parallel-size", "n, chunks of layers a rank", "--vpp"),
        Flag("--context-parallel-size", "c (1 until its attention is built)", "--cp"),
        Flag("--sequence-parallel", "cut norms, dropouts and residuals along the sequence"),
        Flag(
            "--schedule",
            "pipeline schedule; default 1f1b, with --vpp interleaved",
            type=str,
            metavar="NAME",
        ),
    ],
    "model": [
        Flag("--num-layers", "L"),
        Flag("--hidden-size", "h"),
        Flag("--num-attention-heads", "a"),
        Flag("--seq-length", "s"),
        Flag("--vocab-size", "v; text is bytes, so at least 256"),
        Flag("--hidden-dropout", "after embedding, attention and MLP"),
        Flag("--attention-dropout", "of attention probabilities"),
        Flag("--whole-dropout-masks", "draw each mask for the full tensor, so that any layout equals one process"),
        Flag("--untie-embeddings-and-output-weights", "give the head a weight of its own"),
        Flag("--dtype", "of parameters and activations", choices=DTYPES, metavar=None),
    ],
    "training": [
        Flag("--micro-batch-size", "b: samples of one forward pass"),
        Flag("--global-batch-size", "samples of one optimizer step, over all ranks"),
        Flag("--train-iters", "optimizer steps"),
        Flag("--lr", "highest learning rate"),
        Flag("--min-lr", "learning rate at the end of the cosine"),
        Flag("--lr-warmup-iters", "steps of linear warm-up; default: half of all, at most 10", type=int, metavar="N"),
        Flag("--weight-decay", "of matrices; biases and norms have none"),
        Flag("--clip-grad", "largest norm of all gradients together; 0: never clip"),
        Flag("--optimizer", "update rule", choices=OPTIMIZERS, metavar=None),
        Flag("--use-distributed-optimizer", "ZeRO-1: each data-parallel rank keeps a part of the optimizer's state"),
        Flag(
            "--on-nonfinite", "what to do where a loss or a gradient is no number", choices=ON_NONFINITE, metavar=None
        ),
        Flag("--check-invariants", "in every step: replicas equal, shards different, on all ranks"),
        Flag("--seed", "of initial values, data order and dropout"),
        Flag(
            "--data-path",
            "files or folders of text; default: Python's standard library",
            nargs="+",
            type=str,
            metavar="PATH",
        ),
        Flag("--device", "auto: a GPU if there is one", choices=DEVICES, metavar=None),
        Flag("--timeout", "seconds until a waiting rank gives up", metavar="S"),
    ],
    "activations": [
        Flag("--recompute-granularity", "full: groups of layers; selective: modules of a layer", type=str, metavar="G"),
        Flag(
            "--recompute-method",
            "of full: uniform (default), groups of k layers; block, the first k layers of each chunk one by one",
            type=str,
            metavar="M",
        ),
        Flag("--recompute-num-layers", "k; default 1", type=int, metavar="N"),
        Flag(
            "--recompute-modules",
            "of selective: any of core_attn, mlp, layernorm",
            nargs="+",
            type=str,
            metavar="MODULE",
        ),
        Flag(
            "--recompute-keep-microbatches",
            "of the micro-batches in flight on a rank so many keep everything and are not recomputed",
        ),
        Flag("--distribute-saved-activations", "of full: each tensor-parallel rank keeps 1/t of a group's input"),
        Flag("--check-recompute", "compare all that a replay saves with the forward's, and say what differs"),
    ],
    "checkpoints": [
        Flag("--save", "write checkpoints there: at the end, and on Ctrl-C", type=Path, metavar="DIR"),
        Flag(
            "--load",
            "go on from the newest good checkpoint there; start anew if there is none",
            type=Path,
            metavar="DIR",
        ),
        Flag("--save-interval", "steps between two checkpoints; 0: only at the end"),
        Flag("--keep", "checkpoints that stay"),
        Flag("--async-save", "go on training while a checkpoint is written"),
    ],
    "output": [
        Flag("--log-interval", "steps between two lines of a log"),
        Flag("--eval-interval", "steps between two validations; 0: only at the end"),
        Flag("--eval-iters", "batches of a validation"),
        Flag(
            "--compare-with-single-process", "repeat the run in one process and compare: PASS, or FAIL and exit code 1"
        ),
        Flag(
            "--trace",
            "draw the measured timeline of a step above the simulated one",
            type=Path,
            metavar="SVG",
        ),
        Flag("--loss-curve", "draw the losses", type=Path, metavar="PNG"),
        Flag("--run-dir", "write metrics, TensorBoard events and the last timeline there", type=Path, metavar="DIR"),
        Flag("--peak-tflops", "of one device, for the model FLOPs utilisation; 0: unknown"),
        Flag("--dry-run", "one rank of a large world, on paper: build it without weights, run a step, count"),
        Flag("--rank", "of a dry run"),
        Flag("--world-size", "of a dry run", type=int, metavar="N"),
        Flag("--sample", "print as many characters written by the trained model"),
    ],
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m minimeg.train",
        description="Train a GPT on text over tensor, pipeline and data parallelism. Several processes: "
        "python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for title, flags in SECTIONS.items():
        section = result.add_argument_group(title)
        for flag in flags:
            section.add_argument(*flag.names, **flag.settings)
    return result


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line. Like argparse, it prints what is wrong and exits with code 2."""
    values = vars(parser().parse_args(arguments))
    for name in ("data_path", "recompute_modules"):
        values[name] = tuple(values[name])
    return Options(**values)
