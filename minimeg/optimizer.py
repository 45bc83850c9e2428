"""One norm, one clipping factor, one learning rate: the optimizer over a model that nobody holds whole.

The update itself is torch's AdamW or SGD. What it is given, for each piece (all of a parameter, or this rank's range of it):

    main        what is updated: the parameter's own memory, or float32 values beside one in half precision (1 + 1/256 is 1 in bf16)
    gradient    divided by the loss scale, times the clipping factor: the same one on every rank; stages that clip by their own norm
                train another model (torchtitan issue 596)

Then half-precision parameters are rounded from their main values, and under ZeRO the ranks exchange what each has updated (zero.py).
A step whose gradients are not finite is taken by no rank (gradient_norm.py, precision.py).

Megatron-LM: ``Float16OptimizerWithFloat16Params``, ``DistributedOptimizer``.
See it run: ``notebooks/12_data_parallelism.ipynb``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minimeg.buckets import Piece, wide
from minimeg.data_parallel import GradientReducer
from minimeg.gradient_norm import GradientNorm, clip_factor
from minimeg.parallel_state import ParallelState
from minimeg.parameter import Shard, modules_of, named_shards
from minimeg.precision import ON_NONFINITE, LossScaler, NonFiniteError
from minimeg.zero import ModelStates, gather_parameters, model_states

__all__ = ["CosineSchedule", "GradientNorm", "Optimizer", "StatePiece", "clip_factor"]

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


@dataclass(frozen=True)
class CosineSchedule:
    """Learning rate as a function of the step alone, so that resuming needs no state.

    Linear from lr/warm-up to lr over ``warmup`` steps, then half a cosine down to ``minimum`` at the last of ``steps``.
    """

    maximum: float
    minimum: float
    warmup: int
    steps: int

    def __call__(self, step: int) -> float:
        """For step 0, 1, ..."""
        if step < self.warmup:
            return self.maximum * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return self.minimum + (self.maximum - self.minimum) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, eq=False)
class StatePiece:
    """Optimizer state of the elements [start, end) of a parameter's flattened local shard. ``tensor`` is alive: write to load.

    Its shape is that of the shard where the piece is all of it, else [end - start].
    """

    shard: Shard
    tensor: Tensor
    start: int
    end: int


class Optimizer:
    """AdamW or SGD over this rank's pieces, with clipping by the global norm. Weight decay applies to matrices only.

    Args:
        max_norm: clip gradients to this norm; 0: never.
        reducer: the one that sums these gradients. It decides what this rank steps (ZeRO-1), and its buffers are cleared in place.
        scaler: of the loss; None: one with its defaults for fp16 parameters, none for others.
        on_nonfinite: "stop" raises NonFiniteError on all ranks where a loss or a gradient is not finite, "skip" leaves the step out.
            An overflow that the scaler can answer by a smaller scale is always skipped.

    Attributes:
        attempts, updates: steps called, and those of them that were taken.
        skipped: why the last step was not taken; None if it was.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        state: ParallelState,
        *,
        kind: str = "adamw",
        weight_decay: float = 0.0,
        max_norm: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        reducer: GradientReducer | None = None,
        scaler: LossScaler | None = None,
        on_nonfinite: str = "stop",
    ) -> None:
        if kind not in MOMENTS:
            raise ValueError(f'optimizer must be "adamw" or "sgd", got {kind!r}')
        if on_nonfinite not in ON_NONFINITE:
            raise ValueError(f'on_nonfinite must be "stop" or "skip", got {on_nonfinite!r}')
        chunks = modules_of(model)
        self.kind, self.max_norm, self.reducer, self.on_nonfinite = kind, max_norm, reducer, on_nonfinite
        self.norm = GradientNorm(chunks, state, reducer)
        trained = [Piece.all_of(param, shard) for _, param, shard in named_shards(chunks) if param.requires_grad]
        self.pieces = trained if reducer is None else reducer.pieces()
        if scaler is None and any(piece.param.dtype == torch.float16 for piece in trained):
            scaler = LossScaler()
        self.scaler, self.attempts, self.updates = scaler, 0, 0
        self.skipped: str | None = None
        self.main = [_main_values(piece) for piece in self.pieces]
        self.update = self._torch_optimizer(weight_decay, betas, eps)

    def _torch_optimizer(self, weight_decay: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        matrices: dict[bool, list[Tensor]] = {True: [], False: []}
        for piece, main in zip(self.pieces, self.main, strict=True):
            matrices[piece.param.dim() >= 2].append(main)
        groups = [
            {"params": mains, "weight_decay": weight_decay if matrix else 0.0}
            for matrix, mains in matrices.items()
            if mains
        ]
        if not groups:  # more ranks than elements: nothing to step here, but torch wants something
            groups = [{"params": [torch.zeros(0)], "weight_decay": 0.0}]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.0)
        update = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps)
        for main in self.main:  # now and not at the first step: what a checkpoint loads into must be there
            moments = {name: torch.zeros_like(main) for name in MOMENTS["adamw"]}
            update.state[main] = {"step": torch.tensor(0.0), **moments}
        return update

    @property
    def loss_scale(self) -> float:
        """Divide the loss's normaliser by it before a step, and the reported loss after."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @torch.no_grad()
    def step(self, learning_rate: float, loss: Tensor | float | None = None) -> float:
        """Clip, update, and forget the gradients; or skip. Collective over all ranks. Returns the norm before clipping.

        Args:
            loss: this rank's; if it is not finite on some rank, no rank takes the step.

        Raises:
            NonFiniteError: on all ranks alike; no parameter and no state has changed.
        """
        if self.reducer is not None:
            self.reducer.require_finished()
        survey = self.norm.survey(loss)
        norm = survey.norm / self.loss_scale
        self.skipped = None
        if survey.finite:
            self._take(learning_rate, clip_factor(norm, self.max_norm) / self.loss_scale)
            self.updates += 1
        else:
            cause = f"step {self.attempts}: {self.norm.explain(survey, loss)}"
            overflow = self.scaler is not None and self.scaler.can_back_off and not survey.bad_loss
            if self.on_nonfinite == "stop" and not overflow:
                raise NonFiniteError(cause)
            self.skipped = f"{cause}; skipped" + (f", loss scale was {self.loss_scale:g}" if self.scaler else "")
        if self.scaler is not None and not survey.bad_loss:  # a loss that is none says nothing about the scale
            self.scaler.update(overflow=not survey.finite)
        self.attempts += 1
        self._forget_gradients()
        return norm

    def _take(self, learning_rate: float, factor: float) -> None:
        for piece, main in zip(self.pieces, self.main, strict=True):
            grad = piece.param.grad
            main.grad = torch.zeros_like(main) if grad is None else piece.of(grad).to(main.dtype)
            if factor != 1:
                main.grad.mul_(factor)
        for group in self.update.param_groups:
            group["lr"] = learning_rate
        self.update.step()
        for piece, main in zip(self.pieces, self.main, strict=True):
            if main.dtype != piece.param.dtype:
                piece.of(piece.param.data).copy_(main)
        if self.reducer is not None and self.reducer.use_distributed_optimizer:
            gather_parameters(self.reducer)

    def _forget_gradients(self) -> None:
        for piece, main in zip(self.pieces, self.main, strict=True):
            main.grad = piece.param.grad = None
        if self.reducer is not None:
            self.reducer.zero()  # and attached again

    # ---- what a checkpoint keeps ---------------------------------------------------------------------------------------------

    def state_pieces(self) -> dict[tuple[str, str], StatePiece]:
        """{(name of the parameter, "exp_avg" | "exp_avg_sq" | "main"): StatePiece} of what this rank steps, alive.

        "main" only where it is not the parameter itself (half precision). A copy of a tied parameter appears under its own name.
        """
        found = {}
        for piece, main in zip(self.pieces, self.main, strict=True):
            for name in MOMENTS[self.kind]:
                moment = self.update.state[main][name]
                found[piece.shard.name, name] = StatePiece(piece.shard, moment, piece.start, piece.end)
            if main.dtype != piece.param.dtype:
                found[piece.shard.name, "main"] = StatePiece(piece.shard, main, piece.start, piece.end)
        return found

    def scalars(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"attempts": self.attempts, "updates": self.updates, "scaler": scaler}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Continue from numbers that :meth:`scalars` gave. A scaler's state is ignored where none is needed, and missing means anew."""
        self.attempts, self.updates = int(scalars["attempts"]), int(scalars["updates"])
        if self.scaler is not None and scalars.get("scaler") is not None:
            self.scaler.load_state_dict(scalars["scaler"])
        for state in self.update.state.values():
            state["step"].fill_(float(self.updates))

    def model_states(self) -> ModelStates:
        """Bytes of weights, gradients and optimizer state on this rank, measured, beside the formulas."""
        if self.reducer is None:
            raise ValueError(
                "model_states needs the reducer, which holds the gradients: Optimizer(..., reducer=reducer)"
            )
        moments = MOMENTS[self.kind]
        tensors = [self.update.state[main][name] for main in self.main for name in moments]
        return model_states(self.reducer, [*tensors, *self.main], len(moments))


def _main_values(piece: Piece) -> Tensor:
    """The piece of the parameter itself, or float32 values of one in half precision."""
    values = piece.param if piece.whole else piece.of(piece.param.detach())
    return values if values.dtype == wide(values.dtype) else values.detach().to(wide(values.dtype))
