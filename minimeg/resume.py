"""From a Trainer to a checkpoint and back: which tensors and numbers make a run that goes on as if it had never stopped.

Everything that is not here is a function of (seed, step): the learning rate, the order of the data, the dropout masks.

See it run: ``python -m minimeg.train --save out/run --load out/run --save-interval 10``, killed and started again.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from minimeg.checkpoint import Entry, Loaded, Writer, load
from minimeg.checkpoint.manifest import STEP
from minimeg.parameter import named_shards
from minimeg.trainer import Trainer

# Of the model's configuration these may change from one run to the next: the tensors mean the same.
FREE = ("hidden_dropout", "attention_dropout", "sequence_parallel", "whole_dropout_masks", "init_std")
# Which samples a step reads follows from these and its number.
DATA_ORDER = ("seed", "global_batch_size")


def entries_of(trainer: Trainer) -> list[Entry]:
    """This rank's parameters and optimizer state, alive: what is loaded is written into them."""
    shards = {shard.name: (shard, param) for _, param, shard in named_shards(trainer.chunks)}
    entries = [Entry("parameter", shard, param.data) for shard, param in shards.values()]
    replicated = not trainer.options.use_distributed_optimizer
    for (name, kind), piece in trainer.optimizer.state_pieces().items():
        entries.append(Entry(kind, shards[name][0], piece.tensor, piece.start, piece.end, replicated))
    return entries


def about(trainer: Trainer) -> dict[str, Any]:
    """What two runs must have in common to load each other's checkpoints."""
    return {name: value for name, value in asdict(trainer.options.config).items() if name not in FREE}


def save(writer: Writer, trainer: Trainer, step: int) -> None:
    """``step``: steps done. Collective; CheckpointError on every rank if it fails on one."""
    scalars = {"optimizer": trainer.optimizer.scalars()} | {name: getattr(trainer.options, name) for name in DATA_ORDER}
    writer.save(step, entries_of(trainer), about(trainer), scalars)


def resume(trainer: Trainer, folder: Path) -> Loaded | None:
    """Put the trainer where the newest good checkpoint in ``folder`` was; None if there is none at all. Collective.

    Raises:
        CheckpointError: there are checkpoints, and none can be used; nothing has changed.
    """
    there = folder.is_dir() and any(STEP.fullmatch(path.name) for path in (folder, *folder.iterdir()))
    if not any(trainer.state.world.all_gather_json(there)):
        return None
    loaded = load(folder, entries_of(trainer), about(trainer), trainer.state)
    if "optimizer" in loaded.scalars:
        trainer.optimizer.load_scalars(loaded.scalars["optimizer"])
    return loaded


def changes(trainer: Trainer, loaded: Loaded) -> list[str]:
    """Why the run will not go on as if it had never stopped, in words, as far as the checkpoint tells."""
    options = trainer.options
    missing = sorted({entry.kind for entry in entries_of(trainer)} - loaded.kinds - {"main"})
    found = [f"the checkpoint holds no {', '.join(missing)}; the optimizer starts anew"] if missing else []
    for name in DATA_ORDER:
        now, then = getattr(options, name), loaded.scalars.get(name)
        if then not in (None, now):
            flag = f"--{name.replace('_', '-')}"
            found.append(
                f"it was saved with {flag} {then} and goes on with {flag} {now}: the order of the data changes"
            )
    if loaded.step >= options.train_iters:
        found.append(f"no step is left: --train-iters is {options.train_iters}")
    return found
