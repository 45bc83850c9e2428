"""Activation recomputation: forget what a block saved, and run it again when backward asks.

Autograd keeps what backward will need: (34 + 5as/h) sbh bytes a transformer layer in 16 bits. Recomputation keeps the layer's
input instead (2 sbh) and pays a second forward, about a third of a step. Korthikanti et al. 2022, section 5; the core of
attention alone ("selective") gives back 5as/h for a few percent.

    y = checkpoint(layer, x)                    # or Recompute(streams=[my_generator], check=True)(layer, x, mask=mask)

How: autograd hands every tensor it saves to ``saved_tensors_hooks``. While the block runs, our ``pack`` takes the tensor and
returns a numbered, empty slot. The first ``unpack`` in backward replays the block with its first inputs, random states and
autocast, puts what ``pack`` sees this time into the slots, and stops when the last slot still wanted is filled.

Autograd never learns of it: the graph is the one of the plain block, so token ids, keyword and nested tensors,
``torch.autograd.grad``, nesting and higher derivatives need no code here. :mod:`minimeg.recompute_classic` is the other way, an
autograd Function as in Megatron-LM, and a test lists what it gets wrong.

Of nested hooks only the innermost pair is called. Three consequences: the inputs are kept by an identity Function *outside* our
hooks, so that a count from outside, or a recomputed block around this one, sees exactly them; a block inside a block works; and
what a replay saves is announced to ``WATCHERS`` (:mod:`minimeg.memory`), which our hooks would hide from them.

See it run: ``notebooks/11_recomputation.ipynb``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from minimeg.autograd import REPLAYS, apply
from minimeg.comm import Group
from minimeg.replay import Arguments, Piece, Stream, Surroundings, describe, difference

__all__ = ["WATCHERS", "Kept", "RecomputationError", "Recompute", "checkpoint"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

# Each is called with every tensor that a replay saves; what it returns is held as long as the tensor waits for backward.
WATCHERS: list[Callable[[Tensor], object]] = []


class RecomputationError(RuntimeError):
    """The replay is not the forward."""


def checkpoint(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(*args, **kwargs)``, keeping only the tensors among its arguments for backward. See :class:`Recompute`."""
    return Recompute()(function, *args, **kwargs)


class Recompute:
    """How to recompute; call it with a function and its arguments, as often as you like.

    Args:
        streams: generators the block draws from besides the default ones of the CPU and of its tensors' devices. Their states
            are put back for the replay and afterwards restored. (Keyed draws, :mod:`minimeg.rng`, need no stream.)
        group, distribute: keep the first tensor, equal on all t ranks of ``group``, as a flat piece of 1/t on each, and gather it
            in backward. The caller's tensor is not touched. All ranks must run the same blocks.
        check: compare each tensor the replay saves with the forward's, and their number. Keeps them all: for looking for a
            mistake, not for saving memory.

    Tensors may stand anywhere in lists, tuples, dicts and dataclasses. Without grad mode nothing is kept. Tensors that the block
    reaches in other ways (a closure, a module's buffer) are used as they are at the replay.

    Raises, in backward: RecomputationError if the replay saves tensors of other shapes, dtypes or number than the forward
    (with ``check``: other values); RuntimeError if an input or a parameter was changed in place in between.
    """

    def __init__(
        self, streams: Iterable[Stream] = (), group: Group | None = None, distribute: bool = False, check: bool = False
    ) -> None:
        self.streams, self.check = tuple(streams), check
        faults = [
            f"streams[{i}] is a {type(stream).__name__}; it needs get_state() and set_state(state), as a torch.Generator has"
            for i, stream in enumerate(self.streams)
            if not (hasattr(stream, "get_state") and hasattr(stream, "set_state"))
        ]
        if distribute and group is None:
            faults.append("distribute=True needs group=, the ranks that hold equal inputs; or leave it at False")
        if faults:
            raise ValueError("; ".join(faults))
        self.group = group if distribute and group is not None and group.size > 1 else None

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        block = _Block(self, function, args, kwargs)
        with saved_tensors_hooks(block.pack, block.unpack):
            result = function(*args, **kwargs)
        block.complete = True
        return result

    def into(self, consumer: Callable[[T], R], function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """``consumer(function(*args, **kwargs))``, keeping neither what ``function`` saves nor its result, one tensor.

        For a cheap function before an expensive one that saves its input: a norm before a linear. Backward runs ``function`` again,
        not ``consumer``, which is an ordinary part of the graph: what else it saves is kept, inside another recomputed block too.
        (Megatron-LM: ``CheckpointWithoutOutput``.)
        """
        if not torch.is_grad_enabled():
            return consumer(function(*args, **kwargs))
        block = _Block(self, function, args, kwargs)
        with saved_tensors_hooks(block.pack, block.unpack):
            result = function(*args, **kwargs)
        assert isinstance(result, Tensor), "a function whose result is forgotten returns one tensor"
        slot = block.pack_result(result)
        block.complete = True
        place = _place(result)  # no reference to it: autograd keeps the hooks

        def pack(x: Tensor) -> _Slot | Kept:
            return slot if _place(x) == place else _keep(x)

        with saved_tensors_hooks(pack, block.unpack):
            return consumer(result)


# ---- one call of a recomputed function ---------------------------------------------------------------------------------------


class _Stop(Exception):
    """Leaves a replay as soon as it has saved the last tensor that backward needs."""


class Kept:
    """A saved tensor, and the promise that nobody writes to it: autograd's own check ends where hooks begin.

    ``tokens`` live and die with it. It must not be the tensor itself: that may be an output of the node which will hold it, and
    the two would keep each other alive.
    """

    def __init__(self, x: Tensor, tokens: Sequence[object] = ()) -> None:
        self.tensor, self.version, self.tokens = x.detach(), x._version, tokens

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor needed for gradient computation, {describe(self.tensor)}, has been modified by an inplace operation: "
                f"it is at version {self.tensor._version}, expected {self.version}. (A parameter must not be updated between a "
                "block's forward and its backward, either.)"
            )
        return self.tensor


def _keep(x: Tensor) -> Kept:
    """For a tensor that is held although our hooks hide it from those around them."""
    return Kept(x, [watch(x) for watch in WATCHERS])


def _place(x: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements in the same order, as long as one of them lives."""
    return id(x.untyped_storage()), x._version, x.dtype, x.shape, x.stride(), x.storage_offset()


class _Slot:
    """What autograd holds instead of a saved tensor. ``kept`` is filled by a replay and emptied by the node that uses it."""

    __slots__ = ("__weakref__", "dtype", "kept", "position", "shape")

    def __init__(self, position: int, x: Tensor) -> None:
        self.position, self.shape, self.dtype = position, x.shape, x.dtype
        self.kept: Kept | None = None


class _Block:
    def __init__(self, how: Recompute, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function = function
        self.arguments = Arguments(args, kwargs)
        tensors = self.arguments.tensors
        self.surroundings = Surroundings(tensors, how.streams)
        self.piece = Piece(tensors[0], how.group) if how.group is not None and tensors else None
        if self.piece is not None:
            tensors[0] = self.piece.cut(tensors[0])
        self.inputs: Any = apply(_KeepInputs, torch.empty(0, requires_grad=True), *tensors)
        tensors.clear()  # from here on autograd keeps them, or a recomputed block around this one forgets them
        self.slots: list[weakref.ref[_Slot]] = []  # weak: a slot dies when backward has released its node
        self.expected: list[Tensor] | None = [] if how.check else None
        self.complete = self.forgets_result = False

    def pack(self, x: Tensor) -> _Slot | Kept:
        if _is_parameter(x):
            return Kept(x)  # there anyway: nothing to forget
        slot = _Slot(len(self.slots), x)
        self.slots.append(weakref.ref(slot))
        if self.expected is not None:
            self.expected.append(x.detach())
        return slot

    def pack_result(self, result: Tensor) -> _Slot | Kept:
        """A slot for what the function returned, to be saved by somebody else: the last one, so the replay fills it at its end."""
        self.forgets_result = True
        return self.pack(result)

    def unpack(self, packed: _Slot | Kept) -> Tensor:
        if isinstance(packed, Kept):
            return packed.get()
        if packed.kept is None:  # nothing replayed yet, or used up by an earlier backward through a retained graph
            self.replay()
        # Handed over: it is freed after the node that asked, or after the closure that the node leaves behind.
        kept, packed.kept = packed.kept, None
        assert kept is not None
        return kept.get()

    def replay(self) -> None:
        inputs = list(self.inputs.grad_fn.saved_tensors)  # raises if one was changed in place
        if self.piece is not None:
            inputs[0] = self.piece.gather(inputs[0])
        args, kwargs = self.arguments.filled(inputs)
        del inputs
        last = max(position for position, slot in enumerate(self.slots) if slot() is not None)
        to_the_end = self.expected is not None and self.complete  # incomplete: the function itself calls autograd.grad
        faults: list[str] = []
        count = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal count
            if not _is_parameter(x):
                if count < len(self.slots):
                    faults.extend(self.fill(count, x))
                count += 1
                if count > last and not to_the_end:
                    raise _Stop
            return x.detach()

        def foresee(tensors: Sequence[Tensor]) -> None:
            """An operation will save these when it is done. If nothing after them is wanted, it need not begin."""
            coming = [x for x in tensors if not _is_parameter(x)]
            if count + len(coming) > last and not to_the_end and _innermost(pack):
                for x in coming:
                    pack(x)

        try:
            hooks = saved_tensors_hooks(pack, lambda x: x)
            with self.surroundings.restored(), torch.enable_grad(), hooks, _listening(foresee), suppress(_Stop):
                result = self.function(*args, **kwargs)
                if self.forgets_result:
                    pack(result)
            if count <= last or (to_the_end and count != len(self.slots)):
                faults.append(f"the forward saved {len(self.slots)} tensors, the replay {count}")
            if faults:
                raise RecomputationError(self.explain(faults))
        except BaseException:
            for slot in filter(None, (reference() for reference in self.slots)):
                slot.kept = None  # a caller who goes on must not meet half a replay
            raise

    def fill(self, position: int, x: Tensor) -> list[str]:
        """Put ``x`` where the forward saved its tensor number ``position``; says how the two differ."""
        slot = self.slots[position]()
        if slot is not None:
            slot.kept = _keep(x)
        how = ""
        if slot is not None and (slot.shape, slot.dtype) != (x.shape, x.dtype):
            how = f"{describe(slot)} in the forward, {describe(x)} in the replay"
        elif self.expected is not None:
            how = difference(self.expected[position], x)
        return [f"saved tensor {position} of {len(self.slots)}: {how}"] if how else []

    def explain(self, faults: list[str]) -> str:
        function = self.function.func if isinstance(self.function, partial) else self.function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        where = f" ({self.surroundings.label})" if self.surroundings.label else ""
        lines = "".join(f"\n  {fault}" for fault in faults)
        return (
            f"{name}{where} does not do the same again, so its gradient would be wrong:{lines}\nUsual causes: a generator that is "
            "not in streams, a buffer or a Python variable that the block itself changes, a branch on something that has changed since."
        )


@contextmanager
def _listening(foresee: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    REPLAYS.append(foresee)
    try:
        yield
    finally:
        REPLAYS.pop()


def _innermost(pack: Callable[[Tensor], object]) -> bool:
    """Are these the hooks that the next saved tensor goes to? If torch does not say: no."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None)(True)
    return top is not None and top[0] is pack


class _KeepInputs(Function):
    """The identity. It keeps the block's inputs, so that autograd watches over them, whoever's hooks are active."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("this node lies beside the graph: nothing flows back to it")


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
