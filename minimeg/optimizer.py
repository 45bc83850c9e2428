"""One global norm, one clipping factor, one learning rate: the optimizer over a model that nobody holds whole.

The update itself is torch's AdamW or SGD, on this rank's shards. What parallelism adds:

* **The norm** of all gradients together. A sharded parameter contributes from every tp rank, a replicated one once, the copy of a tied
  one not at all. Each parameter's sum of squares is collected under its global name and added in the order of names, in float64, so
  that the result does not depend on the layout. One all-reduce of as many numbers as there are parameters.
* **The clipping factor** is the same on every rank; stages that clip by their own norm train another model (torchtitan issue 596).
* **Half precision**: parameters in bf16 are copies of float32 main parameters, which are what AdamW updates: 1 + 1/256 is 1 in bf16.

Megatron-LM: ``get_grad_norm_fp32``, ``clip_grad_by_total_norm_fp32``, ``Float16OptimizerWithFloat16Params``.
See it run: ``notebooks/12_data_parallelism.ipynb``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minimeg.comm import phase
from minimeg.meta import numbers
from minimeg.parallel_state import ParallelState
from minimeg.parameter import Shard, named_shards


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


class GradientNorm:
    """The 2-norm of all gradients of the whole model. Build it once (collective); call it once a step (collective)."""

    def __init__(self, model: nn.Module | Iterable[nn.Module], state: ParallelState) -> None:
        self.state = state
        self.parameters = [(param, shard) for _, param, shard in named_shards(model) if shard.tied_to is None]
        everywhere = state.pp.all_gather_json([shard.name for _, shard in self.parameters])
        names = sorted(name for stage in everywhere for name in stage)
        self.position = {name: i for i, name in enumerate(names)}

    def __call__(self) -> float:
        """The norm, the same number on every rank of tp x pp (and of dp, once gradients are reduced)."""
        squares = torch.zeros(len(self.position), dtype=torch.float64, device=self.state.device)
        for param, shard in self.parameters:
            if param.grad is not None and self._counts_here(shard):
                squares[self.position[shard.name]] = param.grad.double().square().sum()
        with phase("norm"):
            squares = self.state.mp.all_reduce(squares)
        return math.sqrt(math.fsum(numbers(squares)))

    def _counts_here(self, shard: Shard) -> bool:
        return shard.dim is not None or self.state.tp.rank == 0


def clip_factor(norm: float, max_norm: float) -> float:
    """max_norm / (norm + 1e-6) where the norm is too large, else 1. max_norm 0: never clip."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class Optimizer:
    """AdamW or SGD over this rank's parameters, with clipping by the global norm and float32 main parameters where needed.

    Weight decay applies to matrices, not to biases and norms.
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
    ) -> None:
        if kind not in ("adamw", "sgd"):
            raise ValueError(f'optimizer must be "adamw" or "sgd", got {kind!r}')
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        self.norm, self.max_norm = GradientNorm(chunks, state), max_norm
        self.parameters = [param for _, param, _ in named_shards(chunks)]
        self.main = [_main_copy(param) for param in self.parameters]
        groups = [
            {"params": [p for p in self.main if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.main if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.update: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps)
            if kind == "adamw"
            else torch.optim.SGD(groups, lr=0.0)
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Clip, update, and forget the gradients. Returns the norm before clipping."""
        norm = self.norm()
        factor = clip_factor(norm, self.max_norm)
        for param, main in zip(self.parameters, self.main, strict=True):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            main.grad = (grad * factor if factor < 1 else grad).to(main.dtype)
        for group in self.update.param_groups:
            group["lr"] = learning_rate
        self.update.step()
        for param, main in zip(self.parameters, self.main, strict=True):
            if main is not param:
                param.copy_(main)
            param.grad = main.grad = None
        return norm


def _main_copy(param: nn.Parameter) -> Tensor:
    """The parameter itself, or a float32 copy of one in half precision."""
    return param if param.dtype in (torch.float32, torch.float64) else param.detach().float()
