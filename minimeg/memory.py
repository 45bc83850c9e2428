"""A microscope for activation memory: every tensor that autograd keeps for backward, its bytes, who saved it, until when.

    with activation_memory(model) as m:
        with m.label("micro-batch 0"):
            loss = model(tokens)
        loss.backward()
    print(m.table())        # what was held when most was held
    m.peak, m.live          # bytes; live is 0 once backward has run and nothing is retained

Why not ask the operating system? A resident-set size moves in pages, caches and allocator moods. ``saved_tensors_hooks`` shows
each tensor at the moment autograd saves it, and the object that our hook returns dies at the moment autograd lets go of it:
exact, repeatable, the same on a laptop and on a GPU.

Bytes are counted by storage: q, k and v cut from one product are one piece of memory, and so is a tensor that three operations
save. Parameters are no activations; given the model, its buffers are left out too. The statistics of the norms (a mean and a
deviation a row) are kept apart, as the formulas do: a layer without recomputation holds (34 + 5as/h) sbh bytes in 16 bits,
Korthikanti et al. 2022, equation 1.

Of nested hooks only the innermost pair is called, so a recomputed block hides what it saves: rightly, since it keeps none of it.
Its inputs it saves outside its hooks, where they are seen here, and what it saves in a replay it announces (``WATCHERS``).

See it run: ``notebooks/11_recomputation.ipynb``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from minimeg.recompute import WATCHERS, Kept
from minimeg.replay import LABELS, label

__all__ = ["ActivationMemory", "Bytes", "SavedTensor", "activation_memory", "label"]

By = Literal["tensor", "module", "label"]


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A piece of memory that autograd held. ``shape`` and ``dtype`` of the tensor that was saved first, ``nbytes`` of its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    module: str
    label: str

    @property
    def statistic(self) -> bool:
        """One number a row: the mean or the deviation of a norm, [s, b, 1]."""
        return len(self.shape) > 1 and self.shape[-1] == 1 and self.dtype.is_floating_point


class Bytes(NamedTuple):
    live: int
    peak: int


class _Hold:
    """Counts as one reason to keep a storage, for as long as this object lives."""

    def __init__(self, memory: ActivationMemory, storage: UntypedStorage) -> None:
        self.memory, self.storage = memory, storage

    def __del__(self) -> None:
        self.memory._release(self.storage)


class ActivationMemory:
    """What :func:`activation_memory` has seen. Sizes in bytes.

    ``live``: held now. ``peak``: the most ever held. ``curve``: held after each change, in order.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.live = self.peak = 0
        self.curve: list[int] = []
        self._held: dict[UntypedStorage, tuple[SavedTensor, int]] = {}  # and how many holds it has
        self._changes: list[tuple[int, SavedTensor]] = []  # +1 taken, -1 released; reports are read off this list
        self._modules = [""]
        self._model = model
        owned = [] if model is None else [*model.parameters(), *model.buffers()]
        self._owned = {x.untyped_storage() for x in owned}

    # ---- reading -----------------------------------------------------------------------------------------------------------

    def tensors(self, at: Literal["peak", "now"] = "peak") -> list[SavedTensor]:
        """What was held at the (first) peak, or is held now, in the order in which it was saved."""
        changes = self._changes[: self.curve.index(self.peak) + 1] if at == "peak" and self.curve else self._changes
        held: dict[SavedTensor, None] = {}
        for sign, saved in changes:
            if sign > 0:
                held[saved] = None
            else:
                del held[saved]
        return list(held)

    def statistics(self, at: Literal["peak", "now"] = "peak") -> int:
        """Bytes of the norms' statistics, a part of the peak (or of what is held now) that the formulas leave out."""
        return sum(saved.nbytes for saved in self.tensors(at) if saved.statistic)

    def modules(self, depth: int | None = None) -> dict[str, Bytes]:
        """Live and peak of each module, by the innermost one that was running; names cut after ``depth`` parts if given."""
        return self.grouped(lambda saved: ".".join(saved.module.split(".")[:depth]))

    def labels(self) -> dict[str, Bytes]:
        """Live and peak of each label. A label's peak is its own: it need not fall together with the others'."""
        return self.grouped(lambda saved: saved.label)

    def grouped(self, name_of: Callable[[SavedTensor], str]) -> dict[str, Bytes]:
        """Live and peak of each group of tensors, the groups named as you like."""
        groups: dict[str, Bytes] = defaultdict(lambda: Bytes(0, 0))
        for sign, saved in self._changes:
            name = name_of(saved)
            live = groups[name].live + sign * saved.nbytes
            groups[name] = Bytes(live, max(groups[name].peak, live))
        return dict(groups)

    def table(self, by: By = "tensor", unit: int | None = None, formula: float | None = None) -> str:
        """The peak tensor by tensor, or live and peak of each module or label.

        Args:
            unit: bytes of one unit, e.g. ``s * b * h``: adds a column in that unit.
            formula: what a paper says the peak is, in units (without a unit: in bytes); adds the comparison.
        """
        if by not in ("tensor", "module", "label"):
            raise ValueError(f'by must be "tensor", "module" or "label", got {by!r}')

        def size(count: int) -> str:
            return f"{count:>15,} B" + (f" {count / unit:>10.3f}" if unit else "")

        if by == "tensor":
            lines = [f"{'saved at the peak':<24} {'dtype':<10}{'':>18}"]
            for saved in sorted(self.tensors(), key=lambda saved: -saved.nbytes):
                where = " ".join(filter(None, (saved.module, saved.label)))
                dtype = str(saved.dtype).removeprefix("torch.")
                lines.append(f"{list(saved.shape)!s:<24} {dtype:<10} {size(saved.nbytes)}   {where}".rstrip())
        else:
            groups = self.modules() if by == "module" else self.labels()
            width = max([len(by), *map(len, groups)])
            lines = [f"{by:<{width}} {'live':>17}" + (" " * 11 if unit else "") + f" {'peak':>17}"]
            lines += [f"{name:<{width}} {size(live)} {size(peak)}" for name, (live, peak) in groups.items()]
        apart = self.statistics()
        lines += [f"peak {size(self.peak)}, of which statistics of norms {size(apart)}"]
        if formula is not None:
            measured = (self.peak - apart) / (unit or 1)
            lines.append(f"measured {measured:,.3f} | formula {formula:,.3f} | {measured / formula - 1:+.2%}")
        return "\n".join(line.rstrip() for line in lines)

    # ---- writing -----------------------------------------------------------------------------------------------------------

    def label(self, name: str) -> AbstractContextManager[None]:
        """The function :func:`label`, at hand."""
        return label(name)

    def _pack(self, x: Tensor) -> Kept:
        return Kept(x, [self._hold(x)])

    def _hold(self, x: Tensor) -> _Hold | None:
        storage = x.untyped_storage()
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or storage in self._owned:
            return None
        saved, holds = self._held.get(storage, (None, 0))
        if saved is None:
            saved = SavedTensor(tuple(x.shape), x.dtype, storage.nbytes(), self._modules[-1], LABELS[-1])
            self._change(+1, saved)
        self._held[storage] = saved, holds + 1
        return _Hold(self, storage)

    def _release(self, storage: UntypedStorage) -> None:
        saved, holds = self._held.pop(storage)
        if holds > 1:
            self._held[storage] = saved, holds - 1
        else:
            self._change(-1, saved)

    def _change(self, sign: int, saved: SavedTensor) -> None:
        self._changes.append((sign, saved))
        self.live += sign * saved.nbytes
        self.peak = max(self.peak, self.live)
        self.curve.append(self.live)

    @contextmanager
    def _naming_modules(self) -> Iterator[None]:
        def enter(name: str) -> Any:
            return lambda module, args: self._modules.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._modules.pop()

        with ExitStack() as stack:
            for name, module in () if self._model is None else self._model.named_modules():
                stack.enter_context(_removed(module.register_forward_pre_hook(enter(name or "(model)"))))
                # always_call: a replay leaves the modules by an exception as soon as it has what it needs.
                stack.enter_context(_removed(module.register_forward_hook(leave, always_call=True)))
            yield


@contextmanager
def _removed(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


_OPEN: list[ActivationMemory] = []


@contextmanager
def activation_memory(model: nn.Module | None = None) -> Iterator[ActivationMemory]:
    """Count what autograd saves in this thread until the block ends; its release is counted also after that.

    Args:
        model: its modules' names are noted, and its buffers are left out as its parameters are.

    Raises RuntimeError inside another ``activation_memory()``: the inner one would hide from the outer what it counts.
    """
    if _OPEN:
        raise RuntimeError("activation_memory() is active already and would go blind; use label() to tell parts apart")
    memory = ActivationMemory(model)
    _OPEN.append(memory)
    WATCHERS.append(memory._hold)
    try:
        with memory._naming_modules(), saved_tensors_hooks(memory._pack, Kept.get):
            yield memory
    finally:
        WATCHERS.remove(memory._hold)
        _OPEN.remove(memory)
