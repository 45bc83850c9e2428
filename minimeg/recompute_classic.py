"""Recomputation as an autograd Function: the version to read first, and why minimeg uses the other one.

Forward runs the block without a graph and keeps its inputs. Backward runs it again, with a graph, and calls backward inside
backward. Fifteen lines, and the idea is all there; Megatron-LM's ``CheckpointFunction`` and the paper that brought it to deep
learning (Chen et al. 2016, "Training deep nets with sublinear memory cost") work like this.

But to autograd the block is now a black box with some inputs and outputs, and four things go wrong that
:func:`minimeg.recompute.checkpoint` gets right (``tests/test_recompute.py`` shows each):

* **Token ids.** If no input needs a gradient, no output does: the parameters inside never get one. No error (PyTorch 7617).
* **Tensors in keyword or nested arguments** are not inputs of the Function. Backward inside backward runs on through them into
  the graph outside; the second block that uses the same tensor finds that graph gone.
* **torch.autograd.grad** for a parameter fails: the parameter is not in the graph; for an input it fills every ``.grad`` on the way.
* **No early stop**: whatever the block does after its last saved tensor is done again as well.

See it run: ``notebooks/11_recomputation.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from minimeg.autograd import apply
from minimeg.replay import Stream, Surroundings


class _Checkpoint(Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], streams: tuple[Stream, ...], *inputs: Any) -> Any:
        ctx.function, ctx.is_tensor = function, [isinstance(x, Tensor) for x in inputs]
        ctx.others = [x for x in inputs if not isinstance(x, Tensor)]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.surroundings = Surroundings(tensors, streams)  # before the block draws its first random number
        return function(*inputs)  # autograd has switched grad mode off

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        inputs = [
            next(tensors).detach().requires_grad_(needed) if is_tensor else next(others)
            for is_tensor, needed in zip(ctx.is_tensor, ctx.needs_input_grad[2:], strict=True)
        ]
        with ctx.surroundings.restored(), torch.enable_grad():
            outputs = ctx.function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        # Backward inside backward. It adds to every .grad it comes to, those of the parameters too.
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in inputs)


def classic_checkpoint(
    function: Callable[..., Any], /, *args: Any, streams: Iterable[Stream] = (), **kwargs: Any
) -> Any:
    """``function(*args, **kwargs)``, keeping ``args`` for backward. Right for tensors in ``args``, one of which needs a gradient."""
    return apply(_Checkpoint, partial(function, **kwargs), tuple(streams), *args)
