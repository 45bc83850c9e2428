"""What must be equal across ranks, what must differ, and which parameter on which ranks is not as it must be.

Parallel training rarely fails aloud. A sum that was forgotten leaves two replicas that drift apart, and the loss still falls. These
relations hold after every reduction and after every step of a right run, bit for bit:

    dp x cp    every parameter equal, its reduced gradient and its optimizer state (under ZeRO each rank has another part of these)
    tp         replicated ones equal (a sum over tp gives every rank the same bits), shards of a matrix different
    tied       both copies of the word embedding equal, in gradient and optimizer state too
    everybody  the same number of steps taken, the same loss scale

Each rank takes a fingerprint of every tensor; the fingerprints meet in one gathering over all ranks; then every rank finds the same
faults and raises the same error. It reads all of the model's memory once: the time that takes is reported.

See it run: ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --check-invariants``.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minimeg.buckets import Piece
from minimeg.comm import phase
from minimeg.optimizer import Optimizer
from minimeg.parallel_state import ParallelState
from minimeg.parameter import Shard, named_shards

MOST_SHOWN = 8


class InvariantError(RuntimeError):
    """Replicas that differ, or shards that do not. Raised on all ranks alike."""


@dataclass(frozen=True)
class InvariantReport:
    """What a check that found nothing wrong compared, on this rank, and what it cost."""

    tensors: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"invariants hold: {self.tensors} tensors, {self.bytes:,} bytes of this rank, in {self.seconds * 1e3:.1f} ms"


@dataclass(frozen=True, eq=False)
class _Held:
    """One tensor of this rank. ``kind``: "parameter", "gradient", "exp_avg", ...; ``part``: "" or "[start:end]"."""

    kind: str
    shard: Shard
    tensor: Tensor
    part: str = ""

    def describe(self, tp: int) -> dict[str, Any]:
        """As JSON. "tp" is None where every tensor-parallel rank must hold the same."""
        cut = self.shard.dim is not None
        return {
            "what": f"{self.kind} {self.shard.name}{self.part}",
            "original": f"{self.kind} {self.shard.tied_to or self.shard.name}{self.part}" if self.shard.tied else None,
            "tp": tp if cut else None,
            # Biases begin as zeros and norms as ones, and the last shards of a small vocabulary are padding.
            "differs": cut and self.kind == "parameter" and self.tensor.dim() >= 2 and not _constant(self.tensor),
            "print": _fingerprint(self.tensor),
        }


@torch.no_grad()
def check_invariants(
    chunks: Sequence[nn.Module], state: ParallelState, optimizer: Optimizer | None = None
) -> InvariantReport:
    """Compare parameters, gradients (where there are any) and optimizer state over all ranks. Collective over all ranks.

    Call it after the reductions and before the optimizer's step (then gradients count too), or between two steps.

    Raises:
        InvariantError: the faults by name and rank, the first few of them.
    """
    start = time.perf_counter()
    held = [*_parameters(chunks, optimizer), *_optimizer_state(optimizer)]
    mine = {
        "held": [one.describe(state.tp.rank) for one in held],
        "scalars": None if optimizer is None else optimizer.scalars(),
    }
    with phase("invariants"):
        everyone = state.world.all_gather_json(mine)
    faults = [*_replicas(everyone), *_shards(everyone), *_tied(everyone), *_scalars(everyone)]
    if faults:
        more = [f"... and {len(faults) - MOST_SHOWN} more"] if len(faults) > MOST_SHOWN else []
        raise InvariantError("the ranks disagree:\n  " + "\n  ".join([*faults[:MOST_SHOWN], *more]))
    return InvariantReport(len(held), sum(one.tensor.nbytes for one in held), time.perf_counter() - start)


# ---- what this rank holds ----------------------------------------------------------------------------------------------------


def _parameters(chunks: Sequence[nn.Module], optimizer: Optimizer | None) -> Iterator[_Held]:
    """Parameters and gradients; under ZeRO of a gradient only what this rank steps: the rest of it is not summed."""
    for _, param, shard in named_shards(chunks):
        yield _Held("parameter", shard, param)
    pieces = [Piece.all_of(param, shard) for _, param, shard in named_shards(chunks)]
    for piece in pieces if optimizer is None else optimizer.pieces:
        if piece.param.grad is not None:
            yield _Held("gradient", piece.shard, piece.of(piece.param.grad), _part(piece.shard, piece.start, piece.end))


def _optimizer_state(optimizer: Optimizer | None) -> Iterator[_Held]:
    for (_, kind), piece in optimizer.state_pieces().items() if optimizer is not None else []:
        yield _Held(kind, piece.shard, piece.tensor, _part(piece.shard, piece.start, piece.end))


def _part(shard: Shard, start: int, end: int) -> str:
    return "" if end - start == torch.Size(shard.shape).numel() else f"[{start}:{end}]"


def _fingerprint(x: Tensor) -> str:
    """Of the bits, so that NaN equals itself."""
    if x.is_meta:
        return "no values"
    flat = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()


def _constant(x: Tensor) -> bool:
    return x.is_meta or x.numel() == 0 or bool((x == x.flatten()[0]).all())


# ---- what everybody holds ----------------------------------------------------------------------------------------------------


def _by(everyone: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]]:
    """[(rank, what it holds)] of all that have equal values under the keys."""
    found: dict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for rank, its in enumerate(everyone):
        for one in its["held"]:
            found[tuple(one[key] for key in keys)].append((rank, one))
    return found


def _ranks_by_print(holders: list[tuple[int, dict[str, Any]]]) -> list[list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for rank, one in holders:
        found[one["print"]].append(rank)
    return list(found.values())


def _replicas(everyone: list[dict[str, Any]]) -> Iterator[str]:
    for (what, tp), holders in _by(everyone, "what", "tp").items():
        if len(sides := _ranks_by_print(holders)) > 1:
            where = "every rank must hold the same" if tp is None else f"every rank of tp={tp} must hold the same"
            yield f"{what}: {where}, but it differs between ranks {' and '.join(map(str, sides))}"


def _shards(everyone: list[dict[str, Any]]) -> Iterator[str]:
    for (what, _), holders in _by(everyone, "what", "differs").items():
        shards: dict[str, dict[int, int]] = defaultdict(dict)  # fingerprint -> {tp: a rank}
        for rank, one in holders:
            if one["differs"]:
                shards[one["print"]].setdefault(one["tp"], rank)
        for same in shards.values():
            if len(same) > 1:
                yield f"{what}: ranks {sorted(same.values())} hold different shards of it, but these are equal"


def _tied(everyone: list[dict[str, Any]]) -> Iterator[str]:
    for (original, tp), holders in _by(everyone, "original", "tp").items():
        if original is not None and len({one["print"] for _, one in holders}) > 1:
            copies = ", ".join(f"{one['what'].split(' ', 1)[1]} on rank {rank}" for rank, one in holders)
            yield f"{original}: the copies of this tied parameter differ (tp={tp}): {copies}"


def _scalars(everyone: list[dict[str, Any]]) -> Iterator[str]:
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, its in enumerate(everyone):
        sides[str(its["scalars"])].append(rank)
    if len(sides) > 1:
        yield "the optimizers are out of step: " + "; ".join(f"ranks {ranks}: {what}" for what, ranks in sides.items())
