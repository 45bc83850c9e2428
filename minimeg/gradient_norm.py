"""One number for the whole model, and one decision: the norm of all gradients, and whether they are numbers at all.

**The norm.** A sharded parameter contributes from every tp rank, a replicated one once, the copy of a tied one not at all. (Shards
3 and 4 and a replicated 12: 13. Counted on both ranks it would be 17.69.) Replicas over dp share the work; under ZeRO each has
another part. Each parameter's sum of squares is collected under its global name and added in the order of names, in float64, so that
the result does not depend on the layout. One all-reduce of two numbers a parameter over all ranks.

**The decision** travels in the same all-reduce: a flag for each parameter whose gradient was not finite on some rank. A step is taken
by all ranks or by none. Only if it is not taken do the ranks talk once more, to say where it began.

Megatron-LM: ``get_grad_norm_fp32``, ``clip_grad_by_total_norm_fp32``, ``found_inf``.
See it run: ``notebooks/12_data_parallelism.ipynb``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minimeg.buckets import Piece
from minimeg.comm import phase
from minimeg.data_parallel import GradientReducer
from minimeg.meta import numbers
from minimeg.parallel_state import ParallelState
from minimeg.parameter import Shard, named_shards


@dataclass(frozen=True)
class Survey:
    """What all ranks know after one all-reduce.

    Attributes:
        norm: of all gradients; inf or NaN if one of them is.
        bad: global names of the parameters whose gradient is not finite, sorted.
        bad_loss: the loss of some rank is not finite.
    """

    norm: float
    bad: tuple[str, ...] = ()
    bad_loss: bool = False

    @property
    def finite(self) -> bool:
        return not self.bad and not self.bad_loss


class GradientNorm:
    """The 2-norm of all gradients of the whole model. Build it once (collective); call it once a step (collective).

    With a ``reducer``, what it saw before the sums counts too: afterwards every replica has the same NaN.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        state: ParallelState,
        reducer: GradientReducer | None = None,
    ) -> None:
        self.state, self.reducer = state, reducer
        mine = [(param, shard) for _, param, shard in named_shards(model)]
        everywhere = state.pp.all_gather_json([shard.name for _, shard in mine if shard.tied_to is None])
        names = sorted(name for stage in everywhere for name in stage)
        self.position = {name: i for i, name in enumerate(names)}
        scattered = reducer is not None and reducer.use_distributed_optimizer
        pieces = reducer.pieces() if reducer is not None else [Piece.all_of(param, shard) for param, shard in mine]
        self.counted = [piece for piece in pieces if self._counts_here(piece.shard, scattered)]

    def __call__(self) -> float:
        """The norm, the same number on every rank, once gradients are reduced."""
        return self.survey().norm

    @torch.no_grad()
    def survey(self, loss: Tensor | float | None = None) -> Survey:
        """Norm and decision, the same on every rank. ``loss``: this rank's share; it decides like a gradient."""
        n = len(self.position)
        report = torch.zeros(2 * n + 1, dtype=torch.float64, device=self.state.device)
        squares, flags = report[:n], report[n:]
        for piece in self.counted:
            if piece.param.grad is not None:
                squares[self.position[piece.shard.name]] = piece.of(piece.param.grad).double().square().sum()
        for name, largest in self._largest().items():
            flags[self.position[name]] = ~largest.isfinite()
        if loss is not None:
            flags[-1] = ~torch.as_tensor(loss).isfinite()
        with phase("norm"):
            report = self.state.world.all_reduce(report)
        values = numbers(report)
        norm = math.sqrt(math.fsum(values[:n]))
        if report.is_meta:  # a dry run has no numbers, so none is bad
            return Survey(norm)
        bad = [name for name, i in self.position.items() if values[n + i] or not math.isfinite(values[i])]
        return Survey(norm, tuple(sorted(bad)), bad_loss=values[-1] > 0)

    def explain(self, survey: Survey, loss: Tensor | float | None = None) -> str:
        """Where it began: the first parameter by name, and the ranks. Collective over all ranks, after a survey that is not finite."""
        local = [name for name, largest in self._largest().items() if not largest.isfinite()]
        if self.reducer is None:
            grads = [(piece.shard.name, piece.param.grad) for piece in self.counted]
            local = [name for name, grad in grads if grad is not None and not grad.isfinite().all()]
        mine = {"bad": local, "loss": loss is None or math.isfinite(float(loss))}
        everyone = self.state.world.all_gather_json(mine)
        found = []
        if survey.bad_loss:
            found.append(f"the loss is not finite on ranks {[r for r, its in enumerate(everyone) if not its['loss']]}")
        if survey.bad:
            first = min((name for its in everyone for name in its["bad"]), default=survey.bad[0])
            ranks = [r for r, its in enumerate(everyone) if first in its["bad"]]
            where = f"on ranks {ranks}" if ranks else "though each rank's share is: the sum overflows"
            others = f" (and {len(survey.bad) - 1} other parameters')" if len(survey.bad) > 1 else ""
            found.append(f"the gradient of {first}{others} is not finite {where}")
        return "; ".join(found)

    def _largest(self) -> dict[str, Tensor]:
        """By name: the largest |gradient| of this rank before any sum; the copy of a tied parameter under that one's name."""
        if self.reducer is None:
            return {}
        found: dict[str, Tensor] = {}
        for shard, largest in self.reducer.largest:
            name = shard.tied_to or shard.name
            found[name] = torch.maximum(found[name], largest) if name in found else largest
        return found

    def _counts_here(self, shard: Shard, scattered: bool) -> bool:
        if shard.tied_to is not None or (shard.dim is None and self.state.tp.rank != 0):
            return False
        replicas = self.state.dp_cp
        return scattered or replicas.rank == self.position[shard.name] % replicas.size


def clip_factor(norm: float, max_norm: float) -> float:
    """max_norm / (norm + 1e-6) where the norm is too large, else 1. max_norm 0: never clip."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
