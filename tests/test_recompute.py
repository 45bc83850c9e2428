"""Recomputation: gradients equal to the bit, whatever the arguments; the dice put back; only the inputs kept; mistakes named."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from minimeg.layers import ColumnParallelLinear
from minimeg.linear import WeightGradientStore
from minimeg.memory import activation_memory
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.recompute import RecomputationError, Recompute, checkpoint
from minimeg.recompute_classic import classic_checkpoint
from minimeg.replay import Surroundings


def plain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Block(nn.Module):
    """Norm, linear, GELU, dropout from the default generator, residual. Counts its runs."""

    def __init__(self, h: int = 6, p: float = 0.5) -> None:
        super().__init__()
        self.norm, self.linear, self.p, self.runs = nn.LayerNorm(h), nn.Linear(h, h), p, 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + F.dropout(F.gelu(self.linear(self.norm(x))), self.p)


def inputs(seed: int = 0, h: int = 6, requires_grad: bool = True) -> Tensor:
    return torch.randn(4, h, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_(
        requires_grad
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- arguments of every kind: gradients as without ---------------------------------------------------------------------------


class Named(NamedTuple):
    x: Tensor
    scale: float


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    others: dict[str, Any]
    note: str = "kept"


@dataclass(slots=True)
class Slotted:
    x: Tensor
    y: Tensor | None


W = torch.nn.Parameter(torch.full((6,), 1.5, dtype=torch.float64))


def _sum_all(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return (value.sin() * value * W.sum()).sum() if value.is_floating_point() else value.sum().double()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Frozen):
        value = [value.x, value.others]
    if isinstance(value, Slotted):
        value = [value.x, value.y]
    if isinstance(value, (list, tuple)):
        return sum((_sum_all(item) for item in value), torch.zeros((), dtype=torch.float64))
    return torch.tensor(float(value) if isinstance(value, (int, float)) else 0.0, dtype=torch.float64)


def _use(*args: Any, **kwargs: Any) -> Tensor:
    return _sum_all([*args, kwargs])


ARGUMENTS: dict[str, Callable[[Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "positional": lambda x, y: ((x, y), {}),
    "keyword": lambda x, y: ((), {"x": x, "function": y}),
    "mixed with None, flags, numbers, strings": lambda x, y: ((x, None, True, 2), {"mask": None, "y": y, "mode": "a"}),
    "list and tuple": lambda x, y: (([x, (y, [x])],), {}),
    "dict": lambda x, y: (({"a": x, "b": {"c": y}}, OrderedDict(z=x)), {}),
    "named tuple": lambda x, y: ((Named(x, 2.0), Named(y, 3.0)), {}),
    "dataclasses": lambda x, y: ((Frozen(x, {"y": [y]}),), {"s": Slotted(y, None)}),
    "the same tensor twice": lambda x, y: ((x, x, [x]), {"again": x, "y": y}),
    "not a leaf": lambda x, y: ((x * 2, y.exp()), {"z": x.exp()}),
    "views of each other": lambda x, y: ((x * 1).view(2, 12)[:, :6].split(3, 1), {"y": y.t()[:, None].mT}),
    "no gradient needed": lambda x, y: ((x.detach(), y), {"mask": y.detach() > 0}),
    "integers": lambda x, y: ((torch.arange(3), y, x), {}),
    "a parameter": lambda x, y: ((x, W), {"y": y, "w": [W]}),
    "torch.Size and types": lambda x, y: ((x, x.shape, torch.float64), {"d": x.device, "y": y, "t": Frozen}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_every_kind(name: str) -> None:
    found = []
    for run in (plain, checkpoint, Recompute(check=True)):
        x, y = inputs(1), inputs(2)
        W.grad = None
        args, kwargs = ARGUMENTS[name](x, y)
        run(_use, *args, **kwargs).backward()
        found.append([x.grad, y.grad, W.grad])
    for grads in found[1:]:
        for grad, expected in zip(grads, found[0], strict=True):
            assert (grad is None) == (expected is None)
            assert expected is None or torch.equal(grad, expected)
    assert found[0][2] is not None


def test_a_replay_gets_what_the_forward_got() -> None:
    seen: list[Any] = []

    def block(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return args[0].sin().cos()

    x, mapping, items = inputs(), OrderedDict(a=inputs(1)), [inputs(2)]
    y = checkpoint(block, x, mapping, items, W, x2=x, frozen=Frozen(x, {}), named=Named(x, 2.0))
    items.append("changed later by the caller")
    y.sum().backward()
    (first, second) = seen
    args, kwargs = second
    assert type(args[1]) is OrderedDict
    assert len(args[2]) == 1
    assert args[3] is W
    assert args[0] is kwargs["x2"] is kwargs["frozen"].x  # one tensor stays one
    assert args[0].is_leaf
    assert args[0].requires_grad
    assert args[0].data_ptr() == x.data_ptr()
    assert kwargs["frozen"].note == "kept"
    assert first[1]["frozen"].x is x
    assert type(kwargs["named"]) is Named
    assert kwargs["named"].scale == 2


def test_token_ids_and_tuple_outputs() -> None:  # CASES 33
    class Stage0(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(7, 6), nn.Linear(6, 6)

        def forward(self, ids: Tensor, mask: Tensor | None = None, flag: bool = True) -> tuple[Tensor, Tensor]:
            x = torch.tanh(self.linear(self.embedding(ids)))
            return (x if mask is None else x * mask), (x.square().mean() if flag else x.mean())

    ids = torch.tensor([[1, 2, 6], [0, 2, 2]])
    model = Stage0()
    for mask in (None, torch.tensor([[[1.0], [0.0], [1.0]]])):
        for flag in (True, False):
            grads = []
            for run in (plain, checkpoint, Recompute(check=True)):
                model.zero_grad()
                x, aux = run(model, ids, mask=mask, flag=flag)
                (x.sum() + aux).backward()
                assert all(p.grad is not None for p in model.parameters())
                grads.append([p.grad for p in model.parameters()])
            assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


def test_only_one_output_used() -> None:
    x = inputs()
    late, early = checkpoint(lambda x: (x.sin().exp().cos(), x.sin()), x)
    del late
    early.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_without_grad_mode_nothing_is_kept() -> None:
    class Stream:
        def get_state(self) -> None:
            raise AssertionError("nobody asked for a replay")

        set_state = get_state

    block, x = Block(), inputs()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            y = Recompute(streams=[Stream()])(block, x)  # type: ignore[list-item]
            torch.manual_seed(1)
            assert torch.equal(y, block(x))
            assert not y.requires_grad
    assert block.runs == 4


def test_nothing_requires_a_gradient() -> None:
    y = checkpoint(lambda x: x.sin().cos(), inputs(requires_grad=False))
    assert not y.requires_grad


def test_a_block_without_arguments_and_one_that_returns_its_input() -> None:
    x = inputs()
    y = checkpoint(lambda: (x.sin() * W).cos())
    W.grad = None
    z = checkpoint(lambda x: x, y)
    assert z is y
    z.sum().backward()
    expected = torch.autograd.grad((x.sin() * W).cos().sum(), [x, W])
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(W.grad, expected[1])


# ---- ways of asking for gradients --------------------------------------------------------------------------------------------


def test_autograd_grad() -> None:
    block, x = Block(), inputs()
    wanted = [x, *block.parameters()]
    torch.manual_seed(5)
    expected = torch.autograd.grad(block(x).square().sum(), wanted)
    torch.manual_seed(5)
    found = torch.autograd.grad(checkpoint(block, x).square().sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(w.grad is None for w in wanted)


def test_backward_twice() -> None:
    block, x = Block(), inputs()
    y = checkpoint(block, x).sum()
    first = torch.autograd.grad(y, [x, block.linear.weight], retain_graph=True)
    only = torch.autograd.grad(y, [block.norm.weight], retain_graph=True)  # another part of the graph
    second = torch.autograd.grad(y, [x, block.linear.weight, block.norm.weight], retain_graph=True)
    y.backward()
    assert all(torch.equal(a, b) for a, b in zip([*first, *only], second, strict=True))
    assert torch.equal(x.grad, first[0])
    assert block.runs <= 5  # one replay for each backward at most
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_higher_derivatives() -> None:
    w = inputs(3, 3)

    def block(x: Tensor) -> Tensor:
        return torch.tanh(x @ w[:3, :3]).square() * x.exp()

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(lambda x: checkpoint(block, x).sin(), x)

    x = inputs(4, 3)
    assert torch.autograd.gradcheck(recomputed, x)
    assert torch.autograd.gradgradcheck(recomputed, x)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_inside_the_block(create_graph: bool) -> None:
    def block(x: Tensor) -> Tensor:
        y = (x.sin() * x).exp()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        return (g * x).cos() * x.exp()

    grads = []
    for run in (plain, checkpoint, Recompute(check=True)):
        x = inputs()
        run(block, x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_backward_on_another_thread() -> None:
    """CUDA's backward runs on a thread of the engine."""
    block, x = Block(), inputs()
    torch.manual_seed(0)
    loss = checkpoint(block, x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(block(x).sum(), [x])
    assert torch.equal(x.grad, expected)


# ---- nesting -----------------------------------------------------------------------------------------------------------------


def test_nested_blocks() -> None:
    layers = [Block() for _ in range(4)]

    def deep(run: Callable[..., Any], x: Tensor) -> Tensor:
        def pair(x: Tensor, first: int) -> Tensor:
            return run(layers[first + 1], run(layers[first], x).sin())

        return run(lambda x: run(pair, run(pair, x, 0), first=2), x)

    grads = []
    for run in (plain, checkpoint, Recompute(check=True)):
        x = inputs()
        torch.manual_seed(3)
        for layer in layers:
            layer.zero_grad()
        deep(run, x).sum().backward()
        grads.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
        grads[-1].append(torch.get_rng_state())
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_random_programs() -> None:
    """Blocks in blocks as the dice fall, two sources of random numbers: always the bits of the program without recomputation."""
    layers = [Block() for _ in range(6)]
    stream = torch.Generator()

    def masked(x: Tensor) -> Tensor:
        return x * torch.empty_like(x, dtype=torch.bool).bernoulli_(0.5, generator=stream)

    def program(x: Tensor, dice: random.Random, run: Callable[..., Any], depth: int) -> Tensor:
        for _ in range(dice.randint(1, 3)):
            match dice.choice(["layer", "mask", "inside", "inside", "twice"] if depth else ["layer", "mask"]):
                case "layer":
                    x = dice.choice(layers)(x)
                case "mask":
                    x = masked(x).tanh()
                case "inside":
                    branch = dice.randrange(10**6)
                    x = run(lambda x, branch: program(x, random.Random(branch), run, depth - 1), x, branch=branch)
                case "twice":
                    x = x.sin() * run(dice.choice(layers), x) + run(torch.cos, x)
        return x

    parameters = [p for layer in layers for p in layer.parameters()]
    for seed in range(25):
        found = []
        for run in (plain, Recompute(streams=[stream])):
            torch.manual_seed(seed)
            stream.manual_seed(seed)
            x = inputs(seed)
            y = program(x, random.Random(seed), run, 3).square().sum()
            grads = torch.autograd.grad(y, [x, *parameters], allow_unused=True)
            found.append([*grads, torch.get_rng_state(), stream.get_state()])
        for a, b in zip(*found, strict=True):
            assert a is b is None or torch.equal(a, b), f"program {seed}"


# ---- random numbers and precision: as in the forward -------------------------------------------------------------------------


def _masks(run: Callable[..., Any], stream: torch.Generator) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Dropout 0.5 from the default generator and from a private one -> private masks of each run, grad, states."""
    masks = []

    def block(x: Tensor) -> Tensor:
        mask = torch.empty(100, 100, dtype=torch.bool).bernoulli_(0.5, generator=stream)
        masks.append(mask)
        return F.dropout(x.sin(), 0.5) * mask.double()

    torch.manual_seed(0)
    stream.manual_seed(0)
    x = torch.randn(100, 100, dtype=torch.float64, requires_grad=True)
    y = run(block, x).sum() + torch.rand(1)  # the forward goes on drawing
    y.backward()
    return masks, x.grad, torch.get_rng_state(), stream.get_state()


def test_the_dice_are_put_back_and_nobody_notices() -> None:  # CASES 32
    stream = torch.Generator()
    _, grad, default, private = _masks(plain, stream)
    masks, *found = _masks(Recompute(streams=[stream]), stream)
    assert torch.equal(masks[0], masks[1])
    assert all(torch.equal(a, b) for a, b in zip(found, (grad, default, private), strict=True))


def test_a_forgotten_stream() -> None:
    stream = torch.Generator()
    masks, *_ = _masks(checkpoint, stream)
    assert (masks[0] != masks[1]).double().mean() > 0.4  # silent, without check
    with pytest.raises(
        RecomputationError, match=r"saved tensor 2 of 3: float64\[100, 100\] differs in \d{4} of 10000 .* 1\n"
    ) as e:
        _masks(Recompute(check=True), stream)
    assert "_masks.<locals>.block" in str(e.value)
    assert "streams" in str(e.value)


def test_streams_of_any_kind() -> None:
    class Counter:
        value = 0.0

        def draw(self) -> float:
            self.value += 1
            return self.value

        def get_state(self) -> float:
            return self.value

        def set_state(self, state: float) -> None:
            self.value = state

    counter, x = Counter(), inputs()
    y = Recompute(streams=(c for c in [counter]))(lambda x: (x * counter.draw()).sin(), x)
    counter.draw()
    y.sum().backward()
    assert counter.value == 2
    assert torch.equal(x.grad, x.detach().cos())


def test_an_exception_in_the_replay_leaves_the_dice_as_they_were() -> None:
    class Breaks(Exception):
        pass

    broken, stream, x = False, torch.Generator().manual_seed(1), inputs()

    def block(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5) * torch.rand(6, generator=stream, dtype=torch.float64)
        if broken:
            raise Breaks
        return y.exp()

    loss = Recompute(streams=[stream])(block, x).sum()
    torch.rand(5)
    states = torch.get_rng_state(), stream.get_state()
    broken = True
    with pytest.raises(Breaks):
        loss.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(stream.get_state(), states[1])
    assert torch.is_grad_enabled()
    y = x.sin().exp()  # no hooks are left behind
    assert y.grad_fn._saved_result is not None

    broken = False  # half a replay must not be used
    loss.backward()
    torch.manual_seed(0)
    stream.manual_seed(1)
    (expected,) = torch.autograd.grad(block(x).sum(), [x])
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_default_generators_of_other_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such device here: stand-ins for torch's functions. CUDA has a generator each, Apple's device two functions."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    generator, started = generators[2 if kind == "cuda" else 0], False
    module = (
        SimpleNamespace(default_generators=generators, is_initialized=lambda: started)
        if kind == "cuda"
        else SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    elsewhere: Any = SimpleNamespace(device=torch.device(kind, 2 if kind == "cuda" else 0))

    def draws(around: Surroundings) -> bool:
        """Whether the device's generator is put back, and then restored."""
        first, after = torch.rand(3, generator=generator), generator.get_state()
        with around.restored():
            again = torch.rand(3, generator=generator)
        return torch.equal(first, again) and torch.equal(generator.get_state(), after)

    assert draws(Surroundings([elsewhere]))
    assert not draws(Surroundings([torch.zeros(1)]))  # a device not in use is not started
    started = True
    assert draws(Surroundings([torch.zeros(1)])) == (kind == "cuda")


def test_autocast_is_that_of_the_forward() -> None:
    x, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return torch.softmax(x @ weight, -1) @ weight

    def forward_inside(run: Callable[..., Any], dtype: torch.dtype, cache: bool) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
            y = run(block, x)
        return torch.autograd.grad(y.float().square().sum(), [weight])[0]

    def backward_inside(run: Callable[..., Any]) -> Tensor:
        y = run(block, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(y.square().sum(), [weight])[0]

    for dtype in (torch.bfloat16, torch.float16):
        for cache in (True, False):
            expected = forward_inside(plain, dtype, cache)
            assert torch.equal(forward_inside(Recompute(check=True), dtype, cache), expected)
            assert torch.equal(forward_inside(checkpoint, dtype, cache), expected)
    assert torch.equal(backward_inside(Recompute(check=True)), backward_inside(plain))


# ---- what is kept, and for how long ------------------------------------------------------------------------------------------


class Outside:
    """What plain hooks around everything see: a counter that shares nothing with minimeg."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []

    def __enter__(self) -> Outside:
        self.hooks = saved_tensors_hooks(self._pack, lambda x: x)
        self.hooks.__enter__()
        return self

    def _pack(self, x: Tensor) -> Tensor:
        self.packed.append(x.detach())
        return x.detach()

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_from_outside_exactly_the_inputs_are_seen(backward_inside: bool) -> None:
    block, x, extra = Block(), inputs(), inputs(1, requires_grad=False)

    def both(x: Tensor, *, extra: list[Tensor], ids: Tensor) -> Tensor:
        return checkpoint(block, block(x) * extra[0])

    ids = torch.arange(3)
    torch.manual_seed(0)
    with Outside() as outside:
        y = checkpoint(both, x, extra=[extra, x], ids=ids)
        if backward_inside:
            y.sum().backward()
    if not backward_inside:
        y.sum().backward()
    assert [p.data_ptr() for p in outside.packed] == [x.data_ptr(), extra.data_ptr(), ids.data_ptr()]
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(both(x, extra=[extra], ids=ids).sum(), [x])
    assert torch.equal(x.grad, expected)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What goes away in these tests goes away by reference counting alone: no cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("how", [Recompute(), Recompute(check=True)])
def test_memory_is_given_back(how: Recompute) -> None:
    storages: list[weakref.ref[Any]] = []

    def block(x: Tensor) -> Tensor:
        y = x.sin()
        storages.append(weakref.ref(y.untyped_storage()))
        return y.square().cos()  # square keeps y

    def alive() -> list[bool]:
        return [reference() is not None for reference in storages]

    x = inputs()
    middle = how(block, x * 2)  # x * 2 is held by the block alone
    y = how(block, middle)
    if not how.check:
        assert alive() == [False, False]
    kept = weakref.ref(middle.untyped_storage())
    del middle
    assert kept() is not None
    loss = y.sum()
    del y
    loss.backward()
    assert alive() == [False] * 4  # forwards and replays, while the loss with its graph is still there
    assert kept() is None

    loss = how(block, x * 2).sum()  # never backward: dropping the graph is enough
    del loss
    assert not any(alive())
    loss = how(block, x * 2).sum()
    loss.backward(retain_graph=True)
    assert any(alive()) == how.check  # what was replayed is used up, even if the graph stays
    del loss
    assert not any(alive())

    def outer(x: Tensor) -> Tensor:
        middle = x.sin()
        storages.append(weakref.ref(middle.untyped_storage()))
        return how(torch.exp, middle).cos()

    y = checkpoint(outer, x)
    assert not alive()[-1]  # the inner block's input is the outer one's to forget
    y.sum().backward()
    assert not any(alive())


@pytest.mark.usefixtures("_no_collector")
def test_one_replay_at_a_time() -> None:
    """Backward through a chain of blocks never holds the insides of two."""
    live: set[int] = set()
    most = 0

    def block(x: Tensor) -> Tensor:
        nonlocal most
        y = x.sin()
        live.add(number := len(live) + most * 100)
        weakref.finalize(y.untyped_storage(), live.discard, number)
        most = max(most, len(live))
        return y.exp()

    x = inputs()
    y = x
    for _ in range(5):
        y = checkpoint(block, y)
    assert most == 1
    y.sum().backward()
    assert most == 1


def test_the_replay_stops_when_it_has_enough() -> None:
    ran = []

    def block(x: Tensor, swallow: bool) -> Tensor:
        ran.append("start")
        try:
            y = x.sin().exp()
            ran.append("after")
        except Exception:  # a block that swallows what passes through it
            if not swallow:
                raise
            y = x.sin().exp()
            ran.append("again")
        return y + y.sum()  # saves nothing

    for swallow in (False, True):
        x = inputs()
        ran.clear()
        checkpoint(block, x, swallow).sum().backward()
        assert ran == ["start", "after", "start"]
        (expected,) = torch.autograd.grad(block(x, False).sum(), [x])
        assert torch.equal(x.grad, expected)


def test_only_what_is_still_wanted_is_replayed() -> None:
    """The node of an output that nobody kept is gone: its saved tensor is not waited for."""
    ran = []

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        early = x.sin()
        ran.append("early")
        late = early.exp()
        ran.append("late")
        return early, late

    x = inputs()
    early = checkpoint(block, x)[0]
    early.sum().backward()
    assert ran == ["early", "late"]  # and not once more: the replay stopped inside the first operation
    assert torch.equal(x.grad, x.detach().cos())


def test_weight_gradients_put_aside_outlive_backward() -> None:
    """A closure that B leaves behind holds recomputed tensors; W runs it when the block is long gone."""
    aside: list[Callable[[], Tensor]] = []

    class Deferred(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            x, w = ctx.saved_tensors
            aside.append(lambda: grads[0].t() @ x)
            return grads[0] @ w, None

    weights = [nn.Parameter(torch.randn(6, 6, dtype=torch.float64)) for _ in range(4)]

    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(Deferred.apply(F.dropout(x.sin(), 0.5), w), 0.5).exp()

    found = []
    for run in (plain, checkpoint):
        aside.clear()
        torch.manual_seed(2)
        x = inputs()
        y = x
        for w in weights:
            y = run(block, y, w)
        y.sum().backward()
        del y
        torch.full((1000, 100), float("nan"))  # memory that was freed wrongly would be written over
        found.append([closure() for closure in aside])
    assert len(found[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_deferred_weight_gradient_of_a_real_linear() -> None:
    group = single_process().tp
    grads = []
    for run in (plain, checkpoint):
        torch.manual_seed(0)
        layer = ColumnParallelLinear(6, 6, group=group).double()
        layer.weight_gradients = store = WeightGradientStore()
        x = inputs()
        loss = run(lambda x, layer=layer: F.dropout(layer(F.dropout(x.sin(), 0.5)), 0.5).exp(), x).sum()
        store.record("micro-batch 0")
        loss.backward()
        store.stop()
        assert layer.weight.grad is None
        del loss
        store.run("micro-batch 0")
        store.require_empty()
        grads.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.sin().exp(),
    "view": lambda x: x.sin().exp().view(2, -1),
    "part": lambda x: x.sin().exp()[:, :2],
    "residual": lambda x: x + x.sin().exp(),
    "the input's view": lambda x: x.view(-1),
}


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_output_can_be_freed_before_backward(name: str) -> None:  # CASES 54
    block, x = OUTPUTS[name], inputs()
    y = checkpoint(block, x * 1)
    assert (y._base is None) == (name in ("plain", "residual"))  # recomputation makes no views of its own
    edge, storage = get_gradient_edge(y), weakref.ref(y.untyped_storage())
    grad = torch.ones_like(y)
    del y
    assert storage() is None
    torch.autograd.backward([edge], [grad])
    (expected,) = torch.autograd.grad(block(x * 1).sum(), [x])
    assert torch.equal(x.grad, expected)


# ---- mistakes that would give a wrong gradient -------------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("what", ["input", "parameter", "transposed", "inside", "nested"])
def test_changed_in_place(what: str, watched: bool) -> None:
    x, w = inputs() * 1, nn.Parameter(torch.ones(6, dtype=torch.float64))
    square = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))

    def block(x: Tensor) -> Tensor:
        y = x @ square.t() if what == "transposed" else (x * w).sin()
        if what == "inside":
            x.mul_(2)
        if what == "nested":
            z = y * 1
            y = checkpoint(torch.sin, z)
            z.mul_(2)
        return (y * w).cos()

    def run() -> None:
        y = checkpoint(block, x)
        with torch.no_grad():
            {"input": x, "parameter": w, "transposed": square}.get(what, torch.zeros(1)).add_(1)
        y.sum().backward()

    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        activation_memory() if watched else nullcontext(),
    ):
        run()


def test_operations_in_place_that_are_allowed() -> None:
    grads = []
    for run in (plain, checkpoint, Recompute(check=True)):
        torch.manual_seed(0)
        x = inputs()
        y = run(lambda x: F.dropout(x * 3, 0.5, inplace=True).exp_().cos(), x)
        y.add_(1)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def _unsteady(second: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A block that does ``first`` in the forward and ``second`` in the replay."""
    order = iter((first, second, second))
    return lambda x: next(order)(x)


UNSTEADY = {
    "shape": (
        lambda x: x.sin()[:, :2].exp(),
        lambda x: x.sin()[:2].exp(),
        False,
        r"tensor 1 of 2: float64\[2, 6\] .* float64\[4, 2\]",
    ),
    "dtype": (
        lambda x: x.sin().float().exp(),
        lambda x: x.sin().exp(),
        False,
        r"tensor 1 of 2: float64\[4, 6\] .* float32\[4, 6\]",
    ),
    "fewer": (lambda x: x.sin(), lambda x: x.sin().exp(), False, r"the forward saved 2 tensors, the replay 1"),
    "more": (
        lambda x: x.sin().exp().cos(),
        lambda x: x.sin().exp(),
        True,
        r"the forward saved 2 tensors, the replay 3",
    ),
    "value": (
        lambda x: (x + torch.eye(4, 6)).exp().cos(),
        lambda x: x.exp().cos(),
        True,
        r"(?s)tensor 0 of 2: float64\[4, 6\] differs in 4 of 24 .*tensor 1 of 2: float64\[4, 6\] differs in 4 of 24",
    ),
    "mask": (
        lambda x: torch.where(torch.zeros(4, 6, dtype=torch.bool), x, 0),
        lambda x: torch.where(torch.eye(4, 6, dtype=torch.bool), x, 0),
        True,
        r"tensor 0 of 1: bool\[4, 6\] differs in 4 of 24 elements, by at most 1\n",
    ),
}


@pytest.mark.parametrize("name", UNSTEADY)
def test_a_block_that_is_not_deterministic(name: str) -> None:
    second, first, needs_check, message = UNSTEADY[name]
    x = inputs()
    with pytest.raises(RecomputationError, match=message):
        Recompute(check=True)(_unsteady(second, first), x).sum().backward()
    if needs_check:
        checkpoint(_unsteady(second, first), x).sum().backward()  # not seen without looking for it
    else:
        with pytest.raises(RecomputationError, match=message):
            checkpoint(_unsteady(second, first), x).sum().backward()


def test_after_an_error_the_next_backward_starts_afresh() -> None:
    x, order = inputs(), iter((1.0, 2.0, 1.0))

    def block(x: Tensor) -> Tensor:
        return (x * next(order)).sin().exp()

    loss = Recompute(check=True)(block, x).sum()
    with pytest.raises(RecomputationError):
        loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), [x])
    assert torch.equal(x.grad, expected)


def test_check_knows_nan_and_complex_numbers() -> None:
    x = inputs()
    Recompute(check=True)(lambda x: (x * float("nan")).sin().to(torch.complex64).exp().real, x).sum().backward()
    z = _unsteady(lambda x: (x * 1j).exp().real, lambda x: x.to(torch.complex128).exp().real)
    with pytest.raises(RecomputationError, match="complex128"):
        Recompute(check=True)(z, x).sum().backward()


def test_bad_settings_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)streams\[1\] is a int.*distribute=True needs group="):
        Recompute(streams=[torch.Generator(), 3], distribute=True)  # type: ignore[list-item]


# ---- the input in pieces -----------------------------------------------------------------------------------------------------


class FakeGroup:
    """One of t ranks; the others' pieces come from a test that knows the whole tensor."""

    def __init__(self, size: int, rank: int, pieces: list[Tensor]) -> None:
        self.size, self.rank, self.pieces, self.gathered = size, rank, pieces, 0

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        assert torch.equal(x, self.pieces[self.rank])
        self.gathered += 1
        return torch.cat(self.pieces, dim)


@pytest.mark.parametrize("t", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("layout", ["straight", "transposed", "turned", "part", "ids", "scalar"])
def test_distribute_keeps_a_piece(t: int, layout: str) -> None:
    base = inputs()
    x = {
        "straight": lambda: base * 1,
        "transposed": lambda: (base * 1).t(),
        "turned": lambda: (base * 1).view(2, 3, 4).permute(2, 0, 1),
        "part": lambda: (base * 1)[:, 1:4],
        "ids": lambda: torch.arange(24).view(4, 6),
        "scalar": lambda: base.sum(),
    }[layout]()
    before = x.detach().clone()
    # Written down independently: the elements in the order of memory, zeros behind, t equal pieces.
    flat = {"transposed": base, "turned": base}.get(layout, x).detach().reshape(-1)
    length = (flat.numel() + t - 1) // t
    pieces = list(torch.cat([flat, flat.new_zeros(t * length - flat.numel())]).split(length))
    strides = []

    def block(x: Tensor, y: Tensor) -> Tensor:
        strides.append(x.stride())
        return ((x.double() * W[0]).sin() * y.mean()).exp()

    for rank in {0, t // 2, t - 1}:
        group = FakeGroup(t, rank, pieces)
        y = inputs(3)
        with Outside() as outside:
            out = Recompute(group=group, distribute=True)(block, x, y).sum()  # type: ignore[arg-type]
        wanted = [base, y, W] if layout != "ids" else [y, W]
        found = torch.autograd.grad(out, wanted, retain_graph=True)
        expected = torch.autograd.grad(block(x, y).sum(), wanted, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert group.gathered == (t > 1)
        kept = outside.packed[0]
        assert kept.numel() == (length if t > 1 else x.numel())
        if t > 1:
            assert kept.untyped_storage().nbytes() == length * x.element_size()  # memory of its own
            assert strides[0] == strides[-1] or layout == "part"
    assert torch.equal(x, before)


def test_distribute_on_real_ranks(ranks: Any) -> None:
    for found in ranks(2, _distributed_grads):
        assert found


def _distributed_grads() -> bool:
    group = initialize_model_parallel(tensor_model_parallel_size=2).tp
    how = Recompute(group=group, distribute=True, check=True)
    block, grads, x = Block(h=5), [], torch.empty(0)
    for run in (plain, how):
        torch.manual_seed(0)
        x = inputs(h=5)[:3]  # 15 elements: not divisible by 2
        leaf = x.detach().clone().requires_grad_()
        block.zero_grad()
        run(block, run(block, leaf * 1)).sum().backward()
        grads.append([leaf.grad, *(p.grad for p in block.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and x.shape == (3, 5)


# ---- the classic Function: right where it is right, and the cases it fails ---------------------------------------------------


def test_classic_in_its_own_field() -> None:
    stream = torch.Generator()
    _, grad, default, private = _masks(plain, stream)
    _, *found = _masks(lambda function, x: classic_checkpoint(function, x, streams=[stream]), stream)
    assert all(torch.equal(a, b) for a, b in zip(found, (grad, default, private), strict=True))

    def block(x: Tensor, none: None, y: Tensor, *, flag: bool) -> tuple[Tensor, Tensor]:
        return (x * W).sin() * y, y.exp() if flag else x

    grads = []
    for run in (plain, classic_checkpoint):
        x, y = inputs(1), inputs(2)
        W.grad = None
        a, b = run(block, x, None, y, flag=True)
        (a.sum() + b.cos().sum()).backward()
        grads.append((x.grad, y.grad, W.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_classic_fails_for_token_ids() -> None:
    embedding, ids = nn.Embedding(5, 3), torch.arange(4)
    assert not classic_checkpoint(embedding, ids).requires_grad  # no error: the weight just gets no gradient
    assert checkpoint(embedding, ids).requires_grad


def test_classic_fails_for_a_keyword_tensor_used_twice() -> None:
    def loss(run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        x, w = inputs(1), inputs(2)
        scale = w.exp()  # one graph behind two keyword arguments
        y = run(lambda x, scale: (x * scale).sin(), x, scale=scale)
        y = run(lambda x, scale: (x * scale).sin(), y, scale=scale)
        y.sum().backward()
        return x.grad, w.grad

    expected, found = loss(plain), loss(checkpoint)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    with pytest.raises(RuntimeError, match="second time"):
        loss(classic_checkpoint)


def test_classic_fails_for_autograd_grad() -> None:
    block, x = Block(p=0.0), inputs()
    with pytest.raises(RuntimeError, match="to not have been used"):
        torch.autograd.grad(classic_checkpoint(block, x).sum(), [block.linear.weight])
    torch.autograd.grad(classic_checkpoint(block, x).sum(), [x])
    assert block.linear.weight.grad is not None  # nobody asked for it


def test_classic_runs_to_the_end() -> None:
    ran = []

    def block(x: Tensor) -> Tensor:
        y = x.sin()
        ran.append("after")
        return y + 1

    for run, times in ((classic_checkpoint, 2), (checkpoint, 1)):
        ran.clear()
        run(block, inputs()).sum().backward()
        assert len(ran) == times


def test_a_recompute_object_can_be_copied_and_used_again() -> None:
    how = copy.copy(Recompute(check=True))
    for _ in range(2):
        x = inputs()
        how(torch.sin, x).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())


# ---- into: what the block returns is forgotten as well ---------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("check", [False, True])
def test_into_forgets_the_result_that_a_consumer_saves(check: bool) -> None:
    norm, linear = nn.LayerNorm(6).double(), nn.Linear(6, 6).double()
    runs: list[str] = []
    watched: list[weakref.ref[Any]] = []

    def normed(x: Tensor) -> Tensor:
        runs.append("norm")
        y = F.dropout(norm(x), 0.5)
        watched.append(weakref.ref(y.untyped_storage()))
        return y

    def consume(y: Tensor) -> Tensor:
        runs.append("linear")
        return linear(y).exp() * linear(y)  # saves y twice, and results of its own

    found = []
    for how in (None, Recompute(check=check)):
        torch.manual_seed(1)
        runs.clear()
        watched.clear()
        norm.zero_grad()
        linear.zero_grad()
        x = inputs()
        with activation_memory() as m:
            y = consume(normed(x)) if how is None else how.into(consume, normed, x)
            assert runs == ["norm", "linear"]
            if how is None:
                kept = m.live
            elif not check:
                assert kept - m.live == 192 + 192 + 2 * 4 * 8  # the result, the dropout's mask, the norm's statistics
                assert watched[0]() is None, "nobody holds it"
            y.sum().backward()
        assert m.live == 0
        # The consumer is not run again. It asks twice: what was handed over the first time is made anew.
        assert runs == ["norm", "linear", *([] if how is None else ["norm", "norm"])]
        found.append([y, x.grad, *(p.grad for p in (*norm.parameters(), *linear.parameters())), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_into_without_a_consumer_that_saves() -> None:
    """Nobody asks for the result: what the block itself saved is still replayed; without grad mode nothing is."""
    x = inputs()
    Recompute().into(lambda y: y + 1, lambda x: x.sin().exp(), x).sum().backward()
    expected = inputs()
    (expected.sin().exp() + 1).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    with torch.no_grad():
        assert not Recompute().into(torch.exp, torch.sin, x).requires_grad


def test_into_takes_only_the_result_itself() -> None:
    """A view of it, or the result changed in place, is another tensor: it is kept as it is."""
    for change in (lambda y: y[:2], lambda y: y.t(), lambda y: y.mul_(2), lambda y: y.clone()):
        grads = []
        for run in (lambda consumer, f, x: consumer(f(x)), Recompute().into):
            x = inputs()
            run(lambda y, change=change: change(y).sin().exp(), lambda x: x * 3, x).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_into_inside_a_block_and_around_one() -> None:
    norm, first, second = nn.LayerNorm(6).double(), Block(), Block()

    def plain_run(x: Tensor) -> Tensor:
        return second(first(norm(x)))

    def nested(x: Tensor, how: Recompute) -> Tensor:
        return how.into(lambda y: second(how(first, y)), norm, x)

    parameters = [p for module in (norm, first, second) for p in module.parameters()]
    grads = []
    for how in (None, Recompute(), Recompute(check=True)):
        torch.manual_seed(5)
        x = inputs()
        y = plain_run(x) if how is None else how(nested, x, how)
        grads.append(torch.autograd.grad(y.sum(), [x, *parameters]))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


# ---- a dear operation behind the last wanted tensor does not run -----------------------------------------------------------------


def test_the_last_linear_is_not_repeated() -> None:
    """A Function's tensors are saved when it is done; a linear says before what they will be."""
    group = single_process().tp
    first, second = (ColumnParallelLinear(6, 6, group=group).double() for _ in range(2))

    def block(x: Tensor) -> Tensor:
        return second(first(x).tanh())

    product, flops, grads = 2 * 4 * 6 * 6, [], []
    for run in (plain, checkpoint, Recompute(check=True)):
        x = inputs()
        y = run(block, x).sum()
        first.zero_grad()
        second.zero_grad()
        with FlopCounterMode(display=False) as counter:
            y.backward()
        flops.append(counter.get_total_flops())
        grads.append([x.grad, first.weight.grad, second.weight.grad])
    # Two products for each linear, and the first one's forward again. To compare everything, check runs to the end.
    assert flops == [4 * product, 5 * product, 6 * product]
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_what_a_linear_says_is_not_taken_for_somebody_elses() -> None:
    """Its tensors go to other hooks, or it saves none: then it must not fill a slot of the block."""
    group = single_process().tp
    first, second = (ColumnParallelLinear(6, 6, group=group).double() for _ in range(2))
    frozen = ColumnParallelLinear(6, 6, group=group).double().requires_grad_(False)

    def under_other_hooks(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda y: y.clone(), lambda y: y):
            y = first(x)
        return second(y)

    def behind_a_frozen_one(x: Tensor) -> Tensor:
        return second(frozen(x.detach()))

    def around_another_block(x: Tensor) -> Tensor:
        return second(checkpoint(first, x))

    for block in (under_other_hooks, behind_a_frozen_one, around_another_block):
        expected = torch.autograd.grad(block(inputs()).sum(), [second.weight])
        assert torch.equal(torch.autograd.grad(checkpoint(block, inputs()).sum(), [second.weight])[0], expected[0])
