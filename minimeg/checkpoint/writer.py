"""A checkpoint appears complete or not at all: everything is written beside its place and renamed into it.

    step-00000100.tmp/rank-*.safetensors    each rank writes and fsyncs its own file, then says so in rank-*.json
    step-00000100.tmp/manifest.json         rank 0, when all have: written and fsynced last
    step-00000100/                          renamed: from here on it exists
    latest                                  replaced, by a rename as well
    older ones beyond ``keep``              removed: never before the new one exists

A kill at any point leaves either the old state or the new one, and perhaps a ``.tmp`` that the next save removes. The ranks agree
through files, not through collectives: a background thread may therefore write while training goes on (``asynchronous``). What
training waits for is a copy to host memory.

On several machines the folder must lie on a file system that all of them see.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minimeg.checkpoint.entries import Entry
from minimeg.checkpoint.manifest import MANIFEST, STEP, CheckpointError, Manifest, digest, verify
from minimeg.faults import BOX
from minimeg.parallel_state import ParallelState

LATEST = "latest"


class Writer:
    """Saves the checkpoints of one run. Every rank has one; ``save`` and ``wait`` are collective over all ranks.

    Args:
        keep: how many complete checkpoints stay; the newest always does.
        timeout: seconds that rank 0 waits for the files of the others.
    """

    def __init__(
        self, folder: Path, state: ParallelState, *, keep: int = 2, asynchronous: bool = False, timeout: float = 60.0
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the newest checkpoint always stays")
        self.folder, self.state, self.keep = folder, state, keep
        self.asynchronous, self.timeout = asynchronous, timeout
        self._thread: Thread | None = None
        self._fault: str | None = None

    def save(self, step: int, entries: Sequence[Entry], about: dict[str, Any], scalars: dict[str, Any]) -> None:
        """Write the checkpoint of ``step`` steps done. Without ``asynchronous`` it exists when this returns.

        Raises:
            CheckpointError: on every rank, if any rank could not write, or if the copies of a tied parameter differ.
        """
        self.wait()
        tensors = {f"{number:05d}": (entry, _copy(entry.tensor)) for number, entry in enumerate(self._own(entries))}
        place = self.folder / f"step-{step:08d}"
        self._begin(place, entries)
        if not self.asynchronous:
            self._write(place, step, tensors, about, scalars)
            self.wait()
            return
        self._thread = Thread(target=self._write, args=(place, step, tensors, about, scalars), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the last save is done. CheckpointError on every rank if it failed on one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._agree(self._fault)

    def _agree(self, fault: str | None) -> None:
        self._fault = None
        said = self.state.world.all_gather_json(fault)
        faults = [f"rank {rank}: {one}" for rank, one in enumerate(said) if one]
        if faults:
            if fault is None:
                time.sleep(0.5)  # the rank whose fault it is speaks first, and so is the one that is blamed
            raise CheckpointError("the checkpoint was not written; the one before it stays\n  " + "\n  ".join(faults))

    def _own(self, entries: Sequence[Entry]) -> list[Entry]:
        """What this rank writes: of equal copies only one rank's. Pieces of a shard (ZeRO) exist once."""
        state = self.state
        return [
            entry
            for entry in entries
            if entry.shard.tied_to is None
            and (entry.shard.dim is not None or state.tp.rank == 0)
            and (state.dp_cp.rank == 0 or not entry.replicated)
        ]

    def _begin(self, place: Path, entries: Sequence[Entry]) -> None:
        """An empty place to write to, and tied copies that are equal; agreed on by all."""
        fault = _tied_fault(entries, self.state)
        if self.state.rank == 0:
            try:
                for leftover in self.folder.glob("step-*.tmp"):
                    shutil.rmtree(leftover, ignore_errors=True)
                _beside(place).mkdir(parents=True)
            except OSError as error:
                fault = str(error)
        self._agree(fault)

    def _write(
        self,
        place: Path,
        step: int,
        tensors: dict[str, tuple[Entry, Tensor]],
        about: dict[str, Any],
        scalars: dict[str, Any],
    ) -> None:
        """Everything that touches the disk. No collectives. A failure is kept for ``wait``."""
        try:
            self._enter("shard write")
            name = f"rank-{self.state.rank:05d}.safetensors"
            said: dict[str, Any] = {"entries": []}
            if tensors:
                path = _beside(place) / name
                save_file({key: tensor for key, (_, tensor) in tensors.items()}, path)
                _sync(path)
                said = {
                    "file": {"bytes": path.stat().st_size, "sha256": digest(path)},
                    "entries": [entry.describe(key) for key, (entry, _) in tensors.items()],
                }
                if BOX.take("corrupt"):
                    _flip_a_byte(path)
            _replace(_beside(place) / f"rank-{self.state.rank:05d}.json", json.dumps(said).encode())
            if self.state.rank == 0:
                self._complete(place, step, about, scalars)
        except Exception as error:  # told to all by wait()
            self._fault = f"{type(error).__name__}: {error}"

    def _complete(self, place: Path, step: int, about: dict[str, Any], scalars: dict[str, Any]) -> None:
        """Rank 0, when all ranks have written."""
        said = self._collect(place)
        self._enter("manifest")
        files = {f"rank-{rank:05d}.safetensors": one["file"] for rank, one in enumerate(said) if "file" in one}
        tensors: dict[str, dict[str, Any]] = {}
        for rank, one in enumerate(said):
            for entry in one["entries"]:
                found = tensors.setdefault(
                    entry["name"], {"shape": entry["shape"], "dtype": entry["dtype"], "pieces": []}
                )
                found["pieces"].append({"file": f"rank-{rank:05d}.safetensors", **entry["piece"]})
        for rank in range(len(said)):
            (_beside(place) / f"rank-{rank:05d}.json").unlink()
        _replace(_beside(place) / MANIFEST, Manifest(step, about, scalars, files, tensors).to_bytes())
        self._enter("rename")
        if place.exists() and _is_good(place):  # the same step again, after a resume from an older one
            shutil.rmtree(_beside(place))
        else:
            shutil.rmtree(place, ignore_errors=True)
            _beside(place).replace(place)
        _sync(self.folder)
        _replace(self.folder / LATEST, place.name.encode())
        self._enter("prune")
        complete = sorted(path for path in self.folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir())
        for old in [path for path in complete if path != place][: max(0, len(complete) - self.keep)]:
            shutil.rmtree(old, ignore_errors=True)

    def _enter(self, phase: str) -> None:
        if not self.asynchronous:  # else training goes on, and says itself where it is
            BOX.enter(phase)

    def _collect(self, place: Path) -> list[dict[str, Any]]:
        """What every rank says of its file, once it lies there."""
        deadline = time.monotonic() + self.timeout
        paths = [_beside(place) / f"rank-{rank:05d}.json" for rank in range(self.state.world.size)]
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {missing} have not written their part within {self.timeout:g} s")
            time.sleep(0.005)
        return [json.loads(path.read_bytes()) for path in paths]


def _beside(place: Path) -> Path:
    return place.with_name(place.name + ".tmp")


def _flip_a_byte(path: Path) -> None:
    """MINIMEG_FAULT=...:corrupt: what a bad disk would do."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def _copy(tensor: Tensor) -> Tensor:
    """In host memory, so that training may go on changing the original."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    """Write a file that is either the old one or the new one, whatever happens."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync(path.parent)


def _tied_fault(entries: Sequence[Entry], state: ParallelState) -> str | None:
    """The copies of a tied parameter must be equal, or a resumed run would go on with only one of them."""
    tied = [entry for entry in entries if entry.kind == "parameter" and (entry.shard.tied or entry.shard.tied_to)]
    if not tied:
        return None
    copies = [entry.tensor.detach() for entry in tied]
    if len(copies) == 1 and state.embedding is not None:  # the other is on the other end of the pipeline
        copies = list(state.embedding.all_gather(copies[0].unsqueeze(0)))
    if torch.equal(copies[0], copies[-1]):
        return None
    gap = float((copies[0] - copies[-1]).abs().max())
    return f"the two copies of {tied[0].shard.tied_to or tied[0].shard.name} differ by up to {gap:.1e}: the run is not sound"


def _is_good(place: Path) -> bool:
    try:
        verify(place)
    except CheckpointError:
        return False
    return True
