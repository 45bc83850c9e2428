"""The newest good checkpoint, and this rank's part of it, whatever layout wrote it and whatever layout reads it.

Nothing of the model is changed before the whole checkpoint has verified and every tensor has been found. A bad one is named, and the
one before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from minimeg.checkpoint.entries import Entry, join
from minimeg.checkpoint.manifest import STEP, CheckpointError, Manifest, verify
from minimeg.parallel_state import ParallelState


@dataclass(frozen=True)
class Loaded:
    """Attributes:
    step: optimizer steps done when it was saved.
    scalars: what was saved beside the tensors.
    place: the checkpoint that was used.
    refused: why newer ones were not, a text each.
    kinds: of tensors it holds; only {"parameter"} if it was made without an optimizer.
    """

    step: int
    scalars: dict[str, Any]
    place: Path
    refused: list[str]
    kinds: set[str]


def find(folder: Path) -> tuple[Path, Manifest, list[str]]:
    """The newest checkpoint in ``folder`` that verifies, and why newer ones do not.

    Raises:
        CheckpointError: there is none, or all are bad.
    """
    if STEP.fullmatch(folder.name) and folder.is_dir():
        return folder, verify(folder), []
    places = sorted(
        (path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()) if folder.is_dir() else (),
        reverse=True,
    )
    refused: list[str] = []
    for place in places:
        try:
            return place, verify(place), refused
        except CheckpointError as error:
            refused.append(str(error))
    reasons = "\n  ".join(refused)
    raise CheckpointError(
        f"no checkpoint in {folder} can be used" + (f":\n  {reasons}" if reasons else ": there is none")
    )


@torch.no_grad()
def load(folder: Path, entries: Sequence[Entry], about: dict[str, Any], state: ParallelState) -> Loaded:
    """Fill the tensors of ``entries`` from the newest good checkpoint. Collective over all ranks.

    Args:
        about: the model's configuration, which must be the one that was saved.

    Raises:
        CheckpointError: on every rank, before any tensor has changed: no good checkpoint, another model, or missing tensors.
    """
    fault, told = None, None
    if state.rank == 0:  # one rank reads all of it; the others read only their part
        try:
            place, _, refused = find(folder)
            told = [str(place), refused]
        except (CheckpointError, OSError) as error:
            fault = str(error)
    (told, fault), *_ = state.world.all_gather_json([told, fault])
    if told is None:
        raise CheckpointError(str(fault))
    place, refused = Path(told[0]), list(told[1])
    found: list[Tensor] = []
    manifest = None
    try:
        manifest = Manifest.from_bytes((place / "manifest.json").read_bytes())
        kinds = {name.split("/", 1)[0] for name in manifest.tensors}
        wanted = [entry for entry in entries if entry.kind in kinds or entry.kind in ("parameter", "main")]
        names = [_source(manifest, entry) for entry in wanted]
        _compare(manifest, wanted, names, about)
        found = [  # one whole tensor at a time
            entry.of(whole(place, manifest, name)).to(entry.tensor) for entry, name in zip(wanted, names, strict=True)
        ]
        fault = None
    except (CheckpointError, OSError, ValueError) as error:
        fault = f"{place}: {error}"
    faults = [one for one in dict.fromkeys(state.world.all_gather_json(fault)) if one]
    if faults or manifest is None:
        raise CheckpointError("\n".join(faults))
    for entry, value in zip(wanted, found, strict=True):
        entry.tensor.copy_(value)
    return Loaded(manifest.step, manifest.scalars, place, refused, kinds)


def _source(manifest: Manifest, entry: Entry) -> str:
    """The tensor to read. A parameter in 32 bits takes the main values of a run in 16, which are what it was rounded from; and main
    values take the parameters of a run that had no others."""
    name = entry.name.split("/", 1)[1]
    if entry.kind == "main" or (entry.kind == "parameter" and entry.tensor.element_size() > 2):
        return f"main/{name}" if f"main/{name}" in manifest.tensors else f"parameter/{name}"
    return entry.name


def _compare(manifest: Manifest, entries: Sequence[Entry], names: Sequence[str], about: dict[str, Any]) -> None:
    """Is it a checkpoint of this model? All differences at once."""
    about = json.loads(json.dumps(about))  # as it was written: tuples are lists
    faults = [
        f"{name} is {manifest.about.get(name)!r} in the checkpoint and {about.get(name)!r} here"
        for name in sorted({*manifest.about, *about})
        if manifest.about.get(name) != about.get(name)
    ]
    faults += [f"it does not hold {name}" for name in names if name not in manifest.tensors]
    faults += [
        f"{name} has shape {manifest.tensors[name]['shape']} instead of {list(entry.shard.full_shape)}"
        for entry, name in zip(entries, names, strict=True)
        if name in manifest.tensors and manifest.tensors[name]["shape"] != list(entry.shard.full_shape)
    ]
    if faults:
        raise CheckpointError("it is not of this model:\n    " + "\n    ".join(faults))


def whole(place: Path, manifest: Manifest, name: str) -> Tensor:
    """One tensor of a checkpoint, from all its pieces."""
    tensor = manifest.tensors[name]
    pieces = []
    for piece in tensor["pieces"]:
        with safe_open(place / piece["file"], framework="pt") as file:
            pieces.append((piece, file.get_tensor(piece["key"])))
    return join(name, tensor["shape"], pieces)
