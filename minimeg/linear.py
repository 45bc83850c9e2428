"""The autograd Function under every parallel linear: three things that plain autograd cannot do.

Y = X W^T + b. Its backward is two matrix products with different urgency:

    dX = dY W        the layer below waits for it; under tensor parallelism it is a partial sum that must be all-reduced
    dW = dY^T X      nobody waits for it before the optimizer

1. **Overlap.** The all-reduce of dX (f's backward) travels while dW is computed.
2. **Deferral** (zero bubble, Qi et al. 2023): with a :class:`WeightGradientStore` that is recording, backward computes dX only
   and puts dW aside as a closure; the pipeline runs it when its stage would otherwise be idle.
3. **Sequence parallelism** (Korthikanti et al. 2022, section 4.2.2): X arrives as [s/t, b, h] and is gathered to [s, b, h] for
   the product. What is *kept* is the small piece; backward gathers it again: one extra all-gather, 1/t of the memory.

Megatron-LM: ``linear_with_grad_accumulation_and_async_allreduce``. See it run: ``notebooks/03_parallel_linears.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from minimeg.autograd import apply
from minimeg.comm import Group

InputGradient = Literal["local", "all-reduce", "reduce-scatter"]


class WeightGradientStore:
    """Weight gradients put aside by the backward of a chunk, under the key of the micro-batch they belong to.

    The executor calls ``record(key)`` before a B and ``stop()`` after it; ``run(key)`` is the W. Every layer keeps a reference to
    the store from its forward, so it does not matter which thread autograd uses (CUDA's backward runs on another one).
    """

    def __init__(self) -> None:
        self._aside: dict[Hashable, list[Callable[[], None]]] = {}
        self._recording: Hashable | None = None

    @property
    def recording(self) -> bool:
        return self._recording is not None

    def record(self, key: Hashable) -> None:
        if key in self._aside:
            raise RuntimeError(f"weight gradients of {key} were put aside before and never run")
        self._aside[key] = []
        self._recording = key

    def stop(self) -> None:
        self._recording = None

    def put(self, closure: Callable[[], None]) -> None:
        self._aside[self._recording].append(closure)

    def run(self, key: Hashable) -> None:
        """Compute the weight gradients of ``key``, in the order in which backward met the layers, and forget them."""
        if key not in self._aside:
            raise RuntimeError(f"no weight gradients were put aside for {key}: its B must come before its W")
        for closure in self._aside.pop(key):
            closure()

    def require_empty(self) -> None:
        """RuntimeError if something was put aside and never run: a gradient would be lost."""
        if self._aside:
            raise RuntimeError(f"weight gradients left over at the end of the step: {sorted(map(str, self._aside))}")


def accumulate(param: nn.Parameter, grad: Tensor) -> None:
    """Add to ``param.grad`` as autograd would: the first gradient is taken over, later ones are added in order, in ``grad_dtype``."""
    param.grad = grad.to(param.grad_dtype) if param.grad is None else param.grad.add_(grad)


class _Linear(Function):
    saves = (0, 1)  # x and the weight, known before the product is made

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        group: Group,
        input_gradient: InputGradient,
        store: WeightGradientStore | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.input_gradient, ctx.store = group, input_gradient, store
        ctx.has_bias, ctx.weight = bias is not None, weight
        return F.linear(_whole_input(x, group, input_gradient), weight, bias)  # [s, b, out/t]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        group: Group = ctx.group
        dy = grads[0]
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        under_way = None
        if need_x:
            dx = dy.matmul(weight)  # [s, b, in]: over tp, each rank's share of the sum
            if ctx.input_gradient == "all-reduce" and group.size > 1:
                under_way = group.all_reduce_async(dx)
            elif ctx.input_gradient == "reduce-scatter" and group.size > 1:
                dx = group.reduce_scatter(dx)
        if need_weight:
            dw = _weight_gradient(ctx, dy, x)
        if need_bias and ctx.has_bias:
            db = _rows(dy).sum(0)
        if under_way is not None:
            dx = under_way.wait()
        return dx, dw, db, None, None, None


def _whole_input(x: Tensor, group: Group, input_gradient: InputGradient) -> Tensor:
    gathers = input_gradient == "reduce-scatter" and group.size > 1
    return group.all_gather(x) if gathers else x


def _rows(x: Tensor) -> Tensor:
    """All tokens one below the other: [s, b, h] -> [s b, h]; a single [h] -> [1, h]."""
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(ctx: Any, dy: Tensor, x: Tensor) -> Tensor | None:
    """dY^T X over all tokens, now, or put aside for W (then None: autograd adds nothing)."""

    def compute() -> Tensor:
        whole = _whole_input(x, ctx.group, ctx.input_gradient)
        return _rows(dy).t().matmul(_rows(whole))

    store: WeightGradientStore | None = ctx.store
    if store is None or not store.recording:
        return compute()
    param: nn.Parameter = ctx.weight

    def later() -> None:
        with torch.no_grad():
            accumulate(param, compute())

    store.put(later)
    return None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    *,
    input_gradient: InputGradient,
    store: WeightGradientStore | None = None,
) -> Tensor:
    """x W^T + bias. [s, b, in] -> [s, b, out], where W is [out, in] of this rank.

    ``input_gradient`` says what happens to dX: "local" keeps it (row-parallel: the input is this rank's alone), "all-reduce"
    sums it over the group (column-parallel: f is built in), "reduce-scatter" belongs to sequence parallelism: the input is
    [s/t, b, in], gathered here, and its gradient is summed and cut the same way.
    """
    return apply(_Linear, x, weight, bias, group, input_gradient, store)
