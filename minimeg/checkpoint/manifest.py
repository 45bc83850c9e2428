"""What is in a checkpoint, and every way in which it can be wrong, found before a byte of it is used.

The manifest is one line of JSON that begins with its own sha256. It is written last, so a checkpoint that has one was complete; and it
names the size and sha256 of every file, so one that verifies is the one that was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from minimeg.checkpoint.entries import shard_of

MANIFEST, FORMAT = "manifest.json", 1
STEP = re.compile(r"step-(\d{8})")
FILE = re.compile(r"rank-\d{5}\.safetensors")
LARGEST_MANIFEST = 1 << 30


class CheckpointError(Exception):
    """A checkpoint that cannot be written, or not be used. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    step: optimizer steps done.
    about: the model's configuration: what must be equal for the tensors to mean the same.
    scalars: whatever else was saved: counters, scaler state.
    files: {name: {"bytes", "sha256"}}.
    tensors: {"kind/name": {"shape", "dtype", "pieces": [{"file", "key", "dim", ..., "start", "end"}]}}.
    """

    step: int
    about: dict[str, Any]
    scalars: dict[str, Any]
    files: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]

    def to_bytes(self) -> bytes:
        body = json.dumps({"format": FORMAT, **vars(self)}, sort_keys=True, separators=(",", ":"))
        return f'{{"sha256":"{hashlib.sha256(body.encode()).hexdigest()}","manifest":{body}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """CheckpointError if a single bit is not as it was written."""
        try:
            body = dict(json.loads(data)["manifest"])
            if body.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            manifest = cls(**body)
            if manifest.to_bytes() != data:
                raise ValueError("its checksum does not match")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
        return manifest


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path) -> Manifest:
    """Read the whole checkpoint and compare it with its manifest.

    Raises:
        CheckpointError: with every fault found, each naming its file.
    """
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{folder}: there is no {MANIFEST}: it was never finished")
    if path.stat().st_size > LARGEST_MANIFEST:
        raise CheckpointError(f"{folder}: {MANIFEST} has {path.stat().st_size} bytes, more than {LARGEST_MANIFEST}")
    try:
        manifest = Manifest.from_bytes(path.read_bytes())
        faults = [*_name_faults(folder, manifest), *_file_faults(folder, manifest)]
        faults = faults or _tensor_faults(folder, manifest)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if faults:
        raise CheckpointError(f"{folder}:\n  " + "\n  ".join(faults))
    return manifest


def _name_faults(folder: Path, manifest: Manifest) -> list[str]:
    found = STEP.fullmatch(folder.name)
    faults = []
    if found is None or int(found[1]) != manifest.step:
        faults.append(f"{MANIFEST} is of step {manifest.step}, but the directory is called {folder.name}")
    # "../x" and "/x" are no names of files here, so nothing outside the directory is ever opened.
    faults += [f"{MANIFEST} names a file {name!r}" for name in manifest.files if not FILE.fullmatch(name)]
    return faults


def _file_faults(folder: Path, manifest: Manifest) -> list[str]:
    faults = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not FILE.fullmatch(name):
            continue
        if path.is_symlink() or not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        elif digest(path) != expected["sha256"]:
            faults.append(f"{name} is not what was written: its sha256 differs")
    return faults


def _tensor_faults(folder: Path, manifest: Manifest) -> list[str]:
    """Do the pieces cover each tensor exactly once, and are they in the files? No tensor is read, and no memory taken."""
    faults = []
    held: dict[str, dict[str, tuple[list[int], str]]] = {}
    for name in manifest.files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
                held[name] = {key: (part.get_shape(), part.get_dtype()) for key, part in slices.items()}
        except (SafetensorError, OSError) as error:
            faults.append(f"{name}: {error}")
    for name, tensor in manifest.tensors.items():
        ranges: dict[int, list[tuple[int, int]]] = {}
        for piece in tensor["pieces"]:
            shape, dtype = held.get(piece["file"], {}).get(piece["key"], (None, None))
            size = piece["end"] - piece["start"]
            if shape is None or prod(shape) != size or dtype != _DTYPES.get(tensor["dtype"]):
                faults.append(
                    f"{name}: {piece['file']} does not hold {size} elements of {tensor['dtype']} under {piece['key']!r}"
                )
            ranges.setdefault(piece["index"], []).append((piece["start"], piece["end"]))
        shard = shard_of(tensor["pieces"][0], name, tensor["shape"])
        for part in range(shard.parts):
            end = 0
            for start, stop in sorted(ranges.get(part, [])):
                end = stop if start == end else -1
            if end != prod(shard.shape):
                faults.append(f"{name}: part {part} of {shard.parts} is not covered exactly once")
    return faults


_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}
