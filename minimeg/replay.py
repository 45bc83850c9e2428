"""What it takes to run a function a second time as if it were the first: its arguments, its dice, its precision, its label.

    again = Arguments(args, kwargs)             the tensors, taken out of whatever holds them; the rest stays in place
    around = Surroundings(again.tensors, streams)   states of the random generators, autocast, label
    ...
    with around.restored():
        args, kwargs = again.filled(again.tensors)
        function(*args, **kwargs)               the same masks as before; afterwards nobody sees that it ran

Used by recomputation (:mod:`minimeg.recompute`). Why the dice matter: with a dropout generator that is not put back, forward and
replay mask different elements (half of them at p = 0.5), the gradient belongs to no function at all, and nothing fails.

See it run: ``notebooks/11_recomputation.ipynb``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minimeg.comm import Group


class Stream(Protocol):
    """A source of random numbers, e.g. a torch.Generator. ``get_state`` returns a copy, not the live state."""

    def get_state(self) -> Any: ...
    def set_state(self, state: Any, /) -> Any: ...


# ---- arguments ---------------------------------------------------------------------------------------------------------------


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """A copy of ``value`` with every leaf changed. Lists, tuples, dicts and dataclasses are opened, nested as they may be."""
    if isinstance(value, (list, tuple)):
        items = [map_leaves(change, item) for item in value]
        named = hasattr(value, "_fields")  # a named tuple takes its items one by one
        return type(value)(*items) if named else type(value)(items)
    if isinstance(value, dict):
        mapping = copy.copy(value)  # an OrderedDict, a defaultdict stays one
        mapping.update({key: map_leaves(change, item) for key, item in value.items()})
        return mapping
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        before = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
        after = {name: map_leaves(change, item) for name, item in before.items()}
        if all(after[name] is before[name] for name in before):
            return value  # no tensor in it: a Group, a configuration
        instance: Any = copy.copy(value)
        for name, item in after.items():
            object.__setattr__(instance, name, item)  # works on a frozen one, too
        return instance
    return change(value)


class _Place:
    """Stands where a tensor stood. (No dataclass: those are opened.)"""

    def __init__(self, index: int, requires_grad: bool) -> None:
        self.index, self.requires_grad = index, requires_grad


class Arguments:
    """The arguments of a call, with the tensors taken out.

    ``tensors``: each once, detached, in the order of appearance. A parameter stays in place: it belongs to its model.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        places: dict[int, _Place] = {}

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
                return leaf
            if id(leaf) not in places:
                places[id(leaf)] = _Place(len(self.tensors), leaf.requires_grad)
                self.tensors.append(leaf.detach())
            return places[id(leaf)]

        self._rest = map_leaves(take, (args, kwargs))

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with ``tensors`` in the places of the first ones: leaves that require gradients where those did."""
        fresh: dict[_Place, Tensor] = {}

        def put(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            if leaf not in fresh:
                fresh[leaf] = tensors[leaf.index].detach().requires_grad_(leaf.requires_grad)
            return fresh[leaf]

        args, kwargs = map_leaves(put, self._rest)
        return args, kwargs


class Piece:
    """Of a tensor that t ranks hold alike, the 1/t that this rank keeps: flat, in the order of memory, padded to a multiple."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.group, self.shape = group, x.shape
        # A transposed input comes back transposed: products of it then have the same bits.
        self.order = sorted(range(x.dim()), key=x.stride, reverse=True)

    def cut(self, x: Tensor) -> Tensor:
        """[...] -> [ceil(numel / t)], in memory of its own: ``x`` can be freed."""
        flat = x.permute(self.order).reshape(-1)
        length = -(-flat.numel() // self.group.size)
        own = flat[self.group.rank * length : (self.group.rank + 1) * length]
        piece = flat.new_zeros(length)
        piece[: own.numel()] = own
        return piece

    def gather(self, piece: Tensor) -> Tensor:
        """[ceil(numel / t)] of every rank -> [...]: one all-gather."""
        whole = self.group.all_gather(piece)[: self.shape.numel()].view([self.shape[dim] for dim in self.order])
        return whole.permute([self.order.index(dim) for dim in range(len(self.order))])


# ---- labels: on whose account a tensor is saved --------------------------------------------------------------------------------

LABELS = [""]


class label:
    """``with label(name):`` whatever is saved inside, or in a later replay of it, is listed under ``name`` by :mod:`minimeg.memory`,
    e.g. a micro-batch. It stands in the module, so that a model can label what it does without knowing whether anybody looks.

    A class, since a generator would take four times as long, and every action of a pipeline passes here.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        LABELS.append(self.name)

    def __exit__(self, *error: object) -> None:
        LABELS.pop()


# ---- surroundings ------------------------------------------------------------------------------------------------------------


class Surroundings:
    """What else a function's result depends on: the states of its random generators, and autocast. And its label.

    Args:
        tensors: their devices say which default generators and which autocast settings are meant; the CPU's always are.
        streams: further generators.
    """

    def __init__(self, tensors: Sequence[Tensor], streams: Sequence[Stream] = ()) -> None:
        devices = _devices(tensors)
        defaults = [_default_stream(device) for device in devices]
        self.streams: list[Stream] = [torch.default_generator, *defaults, *streams]
        self.states = [stream.get_state() for stream in self.streams]
        self.label = LABELS[-1]
        self.autocast = {kind: _autocast(kind) for kind in ("cpu", *(device.type for device in devices))}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was when this object was made; at the end, also after an exception, as it was at the start."""
        now = [stream.get_state() for stream in self.streams]
        with ExitStack() as stack:
            for kind, (enabled, dtype, cache) in self.autocast.items():
                if _autocast(kind) != (enabled, dtype, cache):  # as a rule backward runs outside the forward's context
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            stack.enter_context(label(self.label))
            try:
                self._set(self.states)
                yield
            finally:
                self._set(now)

    def _set(self, states: list[Any]) -> None:
        for stream, state in zip(self.streams, states, strict=True):
            stream.set_state(state)


def _devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    """The devices of the tensors and the current one of an accelerator in use; the CPU, always meant, is left out."""
    devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        in_use = getattr(torch.get_device_module(kind), "is_initialized", None)  # asking must not start it
        if kind is not None and in_use is not None and in_use():
            devices.add(torch.device(kind.type, torch.accelerator.current_device_index()))
    return sorted(devices, key=str)


class _DeviceStream:
    """The default generator of a device that only has functions for it (Apple's)."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)

    def get_state(self) -> Any:
        return self.module.get_rng_state()

    def set_state(self, state: Any) -> None:
        self.module.set_rng_state(state)


def _default_stream(device: torch.device) -> Stream:
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    if generators is None:
        return _DeviceStream(device)
    found: Stream = generators[device.index or 0]
    return found


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


# ---- words for what a replay did otherwise -------------------------------------------------------------------------------------


class Described(Protocol):
    """What is left of a tensor that was forgotten."""

    shape: torch.Size
    dtype: torch.dtype


def describe(x: Tensor | Described) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def difference(expected: Tensor, x: Tensor) -> str:
    """How two saved tensors differ; empty if they are equal (NaN equals NaN)."""
    if describe(expected) != describe(x):
        return f"{describe(expected)} in the forward, {describe(x)} in the replay"
    differs = (expected != x) & ~((expected != expected) & (x != x))
    count = int(differs.sum())
    if count == 0:
        return ""
    wide = torch.complex128 if x.is_complex() else torch.float64
    largest = (expected.to(wide) - x.to(wide)).abs()[differs].max().item()
    return f"{describe(x)} differs in {count} of {x.numel()} elements, by at most {largest:.3g}"
