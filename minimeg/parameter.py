"""What a parameter shard is: the one description that initialisation, optimizer, gradient norm and checkpoints all read.

A tensor-parallel rank holds a slice of a matrix; a pipeline rank holds some layers; a tied embedding is held twice. Everything
that must not depend on the layout (initial values, the global norm, what is written to disk) asks a parameter's
:class:`Shard` which part of which full tensor it is.

Python attributes of a parameter are lost by ``deepcopy``, ``.to("meta")``, ``to_empty`` and ``functional_call``. So the *layer*
owns its Shards, and ``param.shard`` is a copy that the layer attaches again.

Megatron-LM: the attributes ``tensor_model_parallel``, ``partition_dim``, ``shared`` and ``sequence_parallel`` of parameters, and
``_initialize_affine_weight_cpu``. See it run: ``notebooks/03_parallel_linears.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minimeg.rng import Key

if TYPE_CHECKING:
    from minimeg.parallel_state import ParallelState

# Fills the FULL tensor in place, so fans are the full fans. A function of a module, not a lambda: layers can be pickled.
Initialiser = Callable[[Tensor, torch.Generator | None], Any]


def normal(std: float = 0.02) -> Initialiser:
    return partial(_normal, std)


def constant(value: float) -> Initialiser:
    return partial(_constant, value)


def xavier_uniform() -> Initialiser:
    return _xavier_uniform


def _normal(std: float, full: Tensor, generator: torch.Generator | None) -> None:
    full.normal_(0.0, std, generator=generator)


def _constant(value: float, full: Tensor, generator: torch.Generator | None) -> None:
    full.fill_(value)


def _xavier_uniform(full: Tensor, generator: torch.Generator | None) -> None:
    nn.init.xavier_uniform_(full, generator=generator)


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``parts`` equal slices along ``dim`` of a tensor of ``full_shape``; ``dim`` None: a whole copy.

    Attributes:
        name: global name; layers count over the whole model, e.g. ``"layers.7.mlp.linear_fc1.weight"``.
        full_shape: of the true tensor, without padding.
        padded: rows added at the end of ``dim`` so that ``parts`` divides it. They take no part in anything.
        partial_over_tp: the parameter is replicated, but each rank saw only part of the tokens (sequence parallelism), so its
            gradients must be summed over the tensor-parallel group, once.
        tied: another pipeline stage holds a copy of this parameter; their gradients must be added.
        tied_to: global name of the parameter that this one is a copy of (the head of a tied model on the last stage).
        init: fills the full tensor; see :func:`initialise`.
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int | None = None
    index: int = 0
    parts: int = 1
    padded: int = 0
    partial_over_tp: bool = False
    tied_to: str | None = None
    tied: bool = False
    init: Initialiser = field(default_factory=normal, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor, padding included."""
        if self.dim is None:
            return self.full_shape
        local = list(self.full_shape)
        local[self.dim] = (local[self.dim] + self.padded) // self.parts
        return tuple(local)

    def cut(self, full: Tensor) -> Tensor:
        """This part of the full tensor, with zeros for padded rows. A new tensor."""
        if tuple(full.shape) != self.full_shape:
            raise ValueError(
                f"{self.name}: the full tensor has shape {list(full.shape)}, expected {list(self.full_shape)}"
            )
        if self.dim is None:
            return full.clone()
        local = full.new_zeros(self.shape)
        width = local.shape[self.dim]
        start = min(self.index * width, full.shape[self.dim])
        real = full.narrow(self.dim, start, min(width, full.shape[self.dim] - start))
        local.narrow(self.dim, 0, real.shape[self.dim]).copy_(real)
        return local

    def join(self, pieces: Tensor) -> Tensor:
        """The full tensor from all parts, joined in order along ``dim``: padding off."""
        return pieces if self.dim is None else pieces.narrow(self.dim, 0, self.full_shape[self.dim]).contiguous()


class ShardedModule(nn.Module):
    """A module that owns the Shards of its own parameters, and keeps ``param.shard`` attached whatever torch does to them."""

    def __init__(self) -> None:
        super().__init__()
        self._shards: dict[str, Shard] = {}

    def add_parameter(self, name: str, shard: Shard, draw: bool = True) -> nn.Parameter:
        """Register an empty parameter of the shard's local shape. ``draw``: fill it from torch's default generator, which
        must be in the same state on every rank of the tensor-parallel group (like Megatron's CPU initialisation)."""
        param = nn.Parameter(torch.empty(shard.shape))
        self.register_parameter(name, param)
        self.set_shard(name, shard)
        if draw and param.device.type != "meta":
            full = torch.empty(shard.full_shape, dtype=param.dtype)
            shard.init(full, None)
            with torch.no_grad():
                param.copy_(shard.cut(full))
        return param

    def set_shard(self, name: str, shard: Shard) -> None:
        self._shards[name] = shard
        self._attach()

    def own_shards(self) -> dict[str, Shard]:
        return dict(self._shards)

    def _attach(self) -> None:
        for name, shard in self._shards.items():
            param = self._parameters.get(name)
            if param is not None:
                param.shard = shard  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._attach()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # assign=True brings new parameters
        super()._load_from_state_dict(*args, **kwargs)
        self._attach()

    def __setstate__(self, state: dict[str, Any]) -> None:  # deepcopy and unpickling
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attach()


def modules_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """A model is one module or the list of this rank's chunks; this is the list."""
    return [model] if isinstance(model, nn.Module) else list(model)


def named_shards(model: nn.Module | Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter, Shard]]:
    """(local path, parameter, Shard) of every parameter, a shared one once.

    ValueError for a parameter that no Shard describes, and for two of one global name: one would overwrite the other.
    """
    seen: set[int] = set()
    paths: dict[str, str] = {}
    for chunk in modules_of(model):
        for prefix, module in chunk.named_modules():
            shards = module._shards if isinstance(module, ShardedModule) else {}
            for name, param in module._parameters.items():
                path = f"{prefix}.{name}" if prefix else name
                if param is None or id(param) in seen:
                    continue
                if name not in shards:
                    raise ValueError(f"parameter {path} has no Shard: make it with ShardedModule.add_parameter")
                seen.add(id(param))
                shard = shards[name]
                if shard.name in paths:
                    raise ValueError(
                        f"parameters {paths[shard.name]} and {path} are both called {shard.name!r}; call name_globally(model)"
                    )
                paths[shard.name] = path
                yield path, param, shard


def name_globally(model: nn.Module) -> None:
    """Write each parameter's path into its Shard. The paths of a GPT chunk are global: its layers carry global indices."""
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, shard in module.own_shards().items():
                module.set_shard(name, replace(shard, name=f"{prefix}.{name}" if prefix else name))


@torch.no_grad()
def initialise(model: nn.Module | Iterable[nn.Module], seed: int) -> None:
    """Fill every parameter with values that depend on (seed, global name) only, not on the layout.

    Each full tensor is drawn on the CPU in float32 (float64 for a float64 parameter) and then sliced; copies of a tied parameter
    draw under the name they are tied to. Costs each rank the memory of one full tensor at a time.
    """
    for _, param, shard in named_shards(model):
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        full = torch.empty(shard.full_shape, dtype=wide)
        shard.init(full, Key(seed, stream=f"init:{shard.tied_to or shard.name}").generator())
        param.copy_(shard.cut(full))


def load_full_state(model: nn.Module | Iterable[nn.Module], full: dict[str, Tensor]) -> None:
    """Give every parameter its slice of the full tensors. KeyError for a missing name, ValueError for a wrong shape."""
    with torch.no_grad():
        for _, param, shard in named_shards(model):
            param.copy_(shard.cut(full[shard.tied_to or shard.name]))


@torch.no_grad()
def full_state(
    model: nn.Module | Iterable[nn.Module],
    state: ParallelState,
    value: Callable[[nn.Parameter], Tensor | None] = lambda param: param,
) -> dict[str, Tensor]:
    """{global name: full tensor} on every rank, on the CPU: gathered over tp, then shared over pp. Collective over tp x pp.

    A tied copy appears once, under the name it is tied to. ``value`` chooses what is gathered for each parameter, e.g.
    ``lambda p: p.grad`` (None counts as zeros).
    """
    mine: dict[str, Tensor] = {}
    for _, param, shard in sorted(named_shards(model), key=lambda item: item[2].name):
        chosen = value(param)
        local = torch.zeros_like(param) if chosen is None else chosen
        if shard.tied_to is None:
            mine[shard.name] = shard.join(
                state.tp.all_gather(local, shard.dim) if shard.dim is not None else local
            ).cpu()
    described = {name: [list(full.shape), str(full.dtype).removeprefix("torch.")] for name, full in mine.items()}
    whole: dict[str, Tensor] = {}
    for stage, names in enumerate(state.pp.all_gather_json(described)):
        for name, (shape, dtype) in names.items():
            full = mine[name] if stage == state.pp.rank else torch.empty(shape, dtype=getattr(torch, dtype))
            whole[name] = state.pp.broadcast(full.to(state.device), stage).cpu()
    return dict(sorted(whole.items()))
