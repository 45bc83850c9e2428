"""What a GPT recomputes: equal gradients to the bit in every layout, what is run again and what is not, and for which micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from minimeg.data import MicroBatch, TextDataset, encode
from minimeg.data_parallel import GradientReducer
from minimeg.memory_table import describe
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.models.recomputation import NOTHING, Plan, Recomputation, sliding_window, window_that_fits
from minimeg.options import Options
from minimeg.parallel_state import ParallelState, initialize_model_parallel, single_process
from minimeg.parameter import initialise, load_full_state
from minimeg.pipeline import run
from minimeg.recompute import Recompute, checkpoint
from minimeg.schedule import Schedule, build, prove
from minimeg.trainer import Trainer
from tests.pipeline.layouts import Layout, global_batch, initial_state, normaliser

# ---- gradients: none, selective, full -------------------------------------------------------------------------------------------

EVERYTHING = ("core_attn", "mlp", "layernorm")


def modes_of(layers: int) -> dict[str, Recomputation]:
    """Every way to recompute a model of so many layers; the last k is all of them."""
    return {
        "selective": Recomputation("selective"),
        "selective mlp": Recomputation("selective", modules=("mlp",)),
        "selective layernorm": Recomputation("selective", modules=("layernorm",)),
        "selective, all three": Recomputation("selective", modules=EVERYTHING),
        **{
            f"{method} {k}": Recomputation("full", method, k)
            for method in ("uniform", "block")
            for k in (1, 2, 3, layers)
        },
        "uniform 3, checked": Recomputation("full", "uniform", 3, check=True),
        "all three, checked": Recomputation("selective", modules=EVERYTHING, check=True),
    }


FEW = ["selective, all three", "uniform 3", "block 1"]
SCHEDULES_OF = {1: (("1f1b", 1),), 2: (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))}


def layouts(layers: int, m: int) -> list[Layout]:
    return [
        Layout(t, 1, p, schedule, chunks, False, m, sp, layers)
        for t in (1, 2, 4)
        for sp in (False, True)
        if t > 1 or not sp
        for p in (1, 2)
        for schedule, chunks in SCHEDULES_OF[p]
    ]


@contextmanager
def counted(chunks: list[GPT]) -> Iterator[Counter[str]]:
    """How often norms, attention cores and MLPs run, replays included."""
    counts: Counter[str] = Counter()

    def note(name: str) -> Any:
        return lambda *_: counts.update([name])

    with ExitStack() as stack:
        for layer in (layer for chunk in chunks for layer in chunk.layers.values()):
            for module in (layer.input_layernorm, layer.pre_mlp_layernorm):
                stack.callback(module.register_forward_pre_hook(note("layernorm")).remove)
            stack.callback(layer.mlp.register_forward_pre_hook(note("mlp")).remove)
            attention = layer.self_attention
            attention.core = _noting(attention.core, note("core_attn"))
            stack.callback(delattr, attention, "core")
        yield counts


def _noting(function: Any, note: Any) -> Any:
    def noted(*args: Any) -> Any:
        note()
        return function(*args)

    return noted


def step(
    layout: Layout, state: ParallelState, mode: Recomputation, window: int = 0, dropout: float = 0.1
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Loss and gradients of this rank after one step, and what ran."""
    schedule = layout.built_schedule()
    config = replace(layout.config(), hidden_dropout=dropout, attention_dropout=dropout)
    stages, m, first = schedule.virtual_stages, schedule.microbatches, state.dp.rank * schedule.microbatches
    kept = sliding_window(schedule, state.pp.rank, window)
    chunks = []
    for c in range(schedule.chunks):
        how = replace(mode, kept=frozenset(first + i for i in kept[c]))
        stage = schedule.virtual_stage(state.pp.rank, c)
        chunks.append(GPT(config, state.tp, stage, stages, 7, how).double())
    load_full_state(chunks, initial_state(config))
    reducer = GradientReducer(chunks, state)
    everything = global_batch(0, layout.dp * m)
    with counted(chunks) as counts:
        result = run(
            schedule,
            chunks,
            everything[first : first + m],
            group=state.pp,
            loss=chunks[-1].loss,
            normaliser=normaliser(everything),
            on_gradients_ready=reducer.ready,
        )
    reducer.finish()
    found = {f"{c}.{name}": p.grad for c, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    return found | {"loss": result.loss}, counts


def compare_modes(
    layout: Layout, modes: dict[str, Recomputation]
) -> tuple[dict[str, list[str]], dict[str, Counter[str]]]:
    """Per mode the names of what is not bit-equal to "none", and what ran."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        expected, ran = step(layout, state, Recomputation())
        assert len(expected) > 10
        assert all(float(grad.abs().max()) > 0 for name, grad in expected.items() if "bias" not in name)
        unequal, counts = {}, {"none": ran}
        for name, mode in modes.items():
            found, counts[name] = step(layout, state, mode)
            assert found.keys() == expected.keys()
            unequal[name] = [key for key in expected if not torch.equal(found[key], expected[key])]
        return unequal, counts


def check_layout(run_on_ranks: Any, layout: Layout, modes: dict[str, Recomputation]) -> None:
    if layout.tp > 1 and not layout.sequence_parallel:
        modes = modes | {"distributed": Recomputation("full", "uniform", 2, distribute=True)}
    once = layout.microbatches * layout.layers // layout.pp  # runs of an MLP on a rank
    in_chunk = layout.layers // (layout.pp * layout.chunks)
    for unequal, counts in run_on_ranks(layout.world, compare_modes, layout, modes, timeout=120):
        assert unequal == {name: [] for name in modes}
        assert counts.pop("none") == {"mlp": once, "core_attn": once, "layernorm": 2 * once}
        for name, ran in counts.items():
            mode = modes[name]
            again = once if mode.method == "uniform" else once * min(mode.num_layers or 0, in_chunk) // in_chunk
            selected = mode.modules if mode.granularity == "selective" else ()
            assert ran == {
                "mlp": once + (once if "mlp" in selected else again),
                "core_attn": once + (once if "core_attn" in selected else again),
                "layernorm": 2 * (once + (once if "layernorm" in selected else again)),
            }, name


@pytest.mark.parametrize("layout", [x for x in layouts(4, 2) if x.tp < 4 or (x.pp, x.chunks) != (2, 1)], ids=str)
def test_gradients_are_equal_to_the_bit_however_they_are_made(run_on_ranks: Any, layout: Layout) -> None:
    """With dropout 0.1: recomputation changes no bit of a loss or gradient, and it did run again what it says."""
    modes = modes_of(layout.layers)
    check_layout(run_on_ranks, layout, modes if layout.world == 1 else {name: modes[name] for name in FEW})


@pytest.mark.soak
@pytest.mark.parametrize("layout", layouts(8, 4), ids=str)
def test_gradients_of_every_mode_in_every_layout(run_on_ranks: Any, layout: Layout) -> None:
    """The same without leaving anything out: two layers a chunk and more, every mode."""
    check_layout(run_on_ranks, layout, modes_of(layout.layers))


def window_steps(layout: Layout, windows: list[int]) -> list[tuple[list[str], int]]:
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        expected, _ = step(layout, state, Recomputation())
        found = []
        for window in windows:
            grads, ran = step(layout, state, Recomputation("full"), window)
            found.append(([name for name in expected if not torch.equal(grads[name], expected[name])], ran["mlp"]))
        return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, 2, "1f1b", microbatches=5, sequence_parallel=True),
        Layout(1, 2, 2, "interleaved", 2, microbatches=4),
        Layout(1, 1, 4, "zb-h1", microbatches=6),
    ],
    ids=str,
)
def test_some_micro_batches_are_recomputed(run_on_ranks: Any, layout: Layout) -> None:
    """Appendix C: a window of micro-batches keeps everything. Equal to the bit, and exactly the others are run again."""
    schedule, windows = layout.built_schedule(), [0, 1, 2, 3, 99]
    results = run_on_ranks(layout.world, window_steps, layout, windows)
    per_chunk = layout.config().num_layers // (layout.pp * layout.chunks)
    for rank, found in enumerate(results):
        pp_rank = rank // (layout.tp * layout.dp)
        for window, (unequal, mlps) in zip(windows, found, strict=True):
            assert unequal == []
            kept = sum(map(len, sliding_window(schedule, pp_rank, window)))
            assert mlps == per_chunk * (2 * layout.microbatches * layout.chunks - kept)
        ran = [mlps for _, mlps in found]
        assert ran == sorted(ran, reverse=True)
        assert ran[0] == 2 * ran[-1]


def trainer_steps(options: Options) -> tuple[int, int]:
    """Place in the pipeline, and runs of an MLP in one training step."""
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, TextDataset(encode("0123456789" * 400), options.seq_length))
    with counted(trainer.chunks) as counts:
        trainer.step(0)
        ran = counts["mlp"]
        trainer.evaluate()
        assert counts["mlp"] - ran == options.eval_iters * ran_once(trainer), "nothing is recomputed in evaluation"
    return state.pp.rank, ran


def ran_once(trainer: Trainer) -> int:
    return sum(len(chunk.layers) for chunk in trainer.chunks) * trainer.schedule.microbatches


def test_the_trainer_keeps_what_the_window_says_on_every_data_parallel_rank(ranks: Any) -> None:
    """Micro-batches are known by their index in the global batch, the window by their order in the schedule."""
    options = Options(
        pipeline_model_parallel_size=2, num_layers=4, hidden_size=16, seq_length=16, micro_batch_size=1,
        global_batch_size=10, recompute_granularity="full", recompute_keep_microbatches=1, eval_iters=1,
    )  # fmt: skip
    schedule = options.training_schedule(4)
    for rank, ran in ranks(4, trainer_steps, options):
        (kept,) = sliding_window(schedule, rank, 1)
        assert 0 < len(kept) <= 5
        assert ran == 2 * (5 + 5 - len(kept))
    for _, ran in ranks(4, trainer_steps, replace(options, recompute_granularity=None, recompute_keep_microbatches=0)):
        assert ran == 2 * 5


@pytest.mark.parametrize(
    ("mode", "dropout", "again"),
    [
        (Recomputation("full"), 0.1, 1 / 3),
        (Recomputation("full", "block", 1), 0.1, 1 / 6),
        # Without dropout nothing is saved behind the MLP's second product, 8 of the forward's 28 parts: it is not repeated.
        (Recomputation("full"), 0.0, 20 / 28 / 3),
        (Recomputation("full", num_layers=2), 0.0, 48 / 56 / 3),
        # The core is a seventh of the forward; its second product is behind the last tensor that backward wants.
        (Recomputation("selective"), 0.1, 1 / 42),
        # So is the second of the MLP.
        (Recomputation("selective", modules=("mlp",)), 0.1, 8 / 28 / 3),
        (Recomputation("selective", modules=("layernorm",)), 0.1, 0),
    ],
    ids=lambda value: describe(value) if isinstance(value, Recomputation) else "",
)
def test_flops_that_are_done_again(mode: Recomputation, dropout: float, again: float) -> None:
    """Counted by torch, for two layers with s = h: a third for everything, and nothing that backward does not want."""
    config = GPTConfig(6, 64, 4, 27, 64, hidden_dropout=dropout, attention_dropout=dropout)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    flops = []
    for how in (Recomputation(), mode):
        stage = GPT(config, single_process().tp, 1, 3, recomputation=how)
        with FlopCounterMode(display=False) as counter:
            stage(
                torch.ones(64, 2, 64, requires_grad=True), MicroBatch(tokens, tokens, tokens == 0, 0, 0)
            ).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == 3 * 2 * (24 * 2 * 64 * 64**2 + 4 * 2 * 64**2 * 64)
    assert flops[1] / flops[0] == pytest.approx(1 + again, rel=1e-12)


# ---- CASES 32 and 33 on the model itself -----------------------------------------------------------------------------------------


def with_default_generator(layout: Layout, modes: list[Recomputation]) -> list[tuple[list[Tensor], Tensor]]:
    """Gradients and the default generator's state after a step of layers that also draw from it (CASES 32)."""
    found = []
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        for mode in modes:
            config = replace(layout.config(), hidden_dropout=0.5, attention_dropout=0.5)
            model = GPT(config, state.tp, recomputation=mode).double()
            load_full_state(model, initial_state(config))
            for layer in model.layers.values():  # in what is replayed: the MLP, and the core of attention
                layer.mlp.register_forward_hook(lambda module, args, out: F.dropout(out, 0.5))
                layer.self_attention.core = _dropping(layer.self_attention.core)
            torch.manual_seed(11)  # the tensor-parallel ranks must draw alike on replicated tensors
            for microbatch in global_batch(0, 2):
                model.loss(model(None, microbatch), microbatch).backward()
                torch.rand(3)  # somebody else draws, too
            found.append(([p.grad for p in model.parameters()], torch.get_rng_state()))
    return found


def _dropping(core: Any) -> Any:
    return lambda *args: F.dropout(core(*args), 0.5)


@pytest.mark.parametrize("t", [1, 2])
def test_masks_of_forward_and_replay_are_the_same(run_on_ranks: Any, t: int) -> None:
    """CASES 32: dropout 0.5, keyed and from the default generator; gradients and generator bit-equal, on every rank."""
    modes = [Recomputation(), Recomputation("selective"), Recomputation("selective", modules=EVERYTHING)]
    modes += [Recomputation("full"), Recomputation("full", "block", 3)]
    results = run_on_ranks(t, with_default_generator, Layout(t), modes)
    for found in results:
        (grads, rng), *others = found
        for other_grads, other_rng in others:
            assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
            assert torch.equal(rng, other_rng)
        assert torch.equal(rng, results[0][0][1]), "the same state on every tensor-parallel rank"


def one_stage(whole: bool) -> tuple[GPT, MicroBatch]:
    config = GPTConfig(2, 16, 4, 27, 8, hidden_dropout=0.1, attention_dropout=0.1)
    model = GPT(config, single_process().tp, 0, 1 if whole else 2, seed=3).double()
    initialise(model, 5)
    return model, global_batch(0, 1)[0]


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "first stage"])
@pytest.mark.parametrize("check", [False, True])
def test_a_stage_that_reads_token_ids(whole: bool, check: bool) -> None:
    """CASES 33: no input of the block needs a gradient, None and a dataclass of tensors among them; all parameters get theirs."""
    model, microbatch = one_stage(whole)
    found = []
    for how in (lambda f, *args: f(*args), Recompute(check=check)):
        model.zero_grad()
        out = how(model, None, microbatch)
        assert out.requires_grad
        out.sin().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        assert not checkpoint(model, None, microbatch).requires_grad


def test_nothing_is_recomputed_in_evaluation() -> None:
    model, microbatch = one_stage(whole=True)
    model.recomputation = Recomputation("full")
    with counted([model]) as counts, torch.no_grad():
        plain = model.eval()(None, microbatch)
    assert counts["mlp"] == 2
    assert torch.equal(plain, model(None, microbatch))


def test_a_mistake_is_found_by_check() -> None:
    """A layer that keeps count: --check-recompute says what differed."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (x * self.calls).sin()

    for mode, check in ((Recomputation("full"), False), (Recomputation("full"), True)):
        model, microbatch = one_stage(whole=True)
        model.recomputation = replace(mode, check=check)
        model.layers["0"].mlp = Counting()
        loss = model.loss(model(None, microbatch), microbatch)
        if check:
            with pytest.raises(
                RuntimeError, match=r"run \(micro-batch 0\) does not [\s\S]* float64\[8, 2, 16\] differs in"
            ):
                loss.backward()
        else:
            loss.backward()


# ---- the plan --------------------------------------------------------------------------------------------------------------------


def grouped(method: str, k: int, layers: int) -> list[tuple[list[int], bool]]:
    plan = Plan(Recomputation("full", method, k), Recompute())
    return [(list(group), again) for group, again in plan.groups(layers)]


def test_groups_of_layers() -> None:
    assert grouped("uniform", 3, 4) == [([0, 1, 2], True), ([3], True)]
    assert grouped("uniform", 2, 4) == [([0, 1], True), ([2, 3], True)]
    assert grouped("uniform", 9, 4) == [([0, 1, 2, 3], True)]
    assert grouped("block", 2, 4) == [([0], True), ([1], True), ([2, 3], False)]
    assert grouped("block", 9, 2) == [([0], True), ([1], True), ([], False)]
    for nothing in (NOTHING, Plan(Recomputation("selective"), Recompute())):
        assert [(list(group), again) for group, again in nothing.groups(3)] == [([0, 1, 2], False)]
    assert [len(group) for group, _ in Plan(Recomputation("full"), Recompute()).groups(3)] == [1, 1, 1]
    group = single_process().tp
    assert Recomputation("full", kept=frozenset([4])).of(4, group) is NOTHING
    assert Recomputation().of(0, group) is NOTHING
    assert Recomputation("full", kept=frozenset([4])).of(5, group) is not NOTHING


FAULTS: list[tuple[Recomputation, dict[str, Any], list[str]]] = [
    (Recomputation("some"), {}, ["recompute_granularity=some", "full, selective"]),
    (Recomputation("full", "rows"), {}, ["recompute_method=rows", "uniform, block"]),
    (Recomputation("full", "uniform", 0), {}, ["recompute_num_layers=0", "1..4"]),
    (Recomputation("full", "block", 5), {}, ["recompute_num_layers=5", "1..4"]),
    (Recomputation("selective", "block", 2), {}, ["recompute_method=block", "recompute_num_layers=2", "granularity=full"]),
    (Recomputation(None, "uniform"), {}, ["recompute_method=uniform needs recompute_granularity=full"]),
    (Recomputation("selective", modules=("core", "mlp")), {}, ["recompute_modules=core ", "core_attn, mlp, layernorm"]),
    (Recomputation("selective", modules=()), {}, ["recompute_modules is empty"]),
    (Recomputation("full", modules=("mlp",)), {}, ["recompute_modules=mlp needs recompute_granularity=selective"]),
    (Recomputation("selective", distribute=True), {"tp": 2}, ["distribute_saved_activations needs", "full"]),
    (Recomputation("full", distribute=True), {"tp": 1}, ["distribute_saved_activations", "tp=1"]),
    (Recomputation("full", distribute=True), {"tp": 2, "sequence_parallel": True}, ["sequence_parallel has cut them"]),
    (Recomputation(check=True), {}, ["check_recompute needs"]),
]  # fmt: skip


@pytest.mark.parametrize("case", FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_what_cannot_be_is_refused(case: Any) -> None:
    mode, how, words = case
    faults = mode.faults(4, **how)
    assert all(any(word in fault for fault in faults) for word in words), faults
    assert len(set(faults)) == len(faults)
    if how.get("tp", 1) == 1:
        with pytest.raises(ValueError, match="this GPT cannot be built"):
            GPT(GPTConfig(4, 8, 2, 27, 8), single_process().tp, recomputation=mode)


def test_what_can_be_has_no_fault() -> None:
    for mode in [Recomputation(), *modes_of(8).values()]:
        assert mode.faults(8) == []
    assert Recomputation("full", distribute=True).faults(4, tp=2) == []


# ---- for which micro-batches -----------------------------------------------------------------------------------------------------

SCHEDULES = [
    build(name, p, m, chunks=n)
    for name, n in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2))
    for p in (1, 2, 3, 4)
    for m in (2 * p, 3 * p + 1)
]


def in_window(schedule: Schedule, rank: int, size: int) -> Iterator[tuple[int, bool, bool]]:
    """(micro-batches that hold everything, is there room, is it kept) at each forward, counted by another way."""
    kept = sliding_window(schedule, rank, size)
    row = schedule.ranks[rank]
    last = "W" if schedule.split else "B"
    for now, action in enumerate(row):
        if action.kind == "F":
            begun = [a for a in row[:now] if a.kind == "F" and a.microbatch in kept[a.chunk]]
            ended = [a for a in row[:now] if a.kind == last and a.microbatch in kept[a.chunk]]
            holding = len(begun) - len(ended)
            yield holding, holding < size, action.microbatch in kept[action.chunk]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.stages}-{s.microbatches}")
def test_the_window_is_never_overfull_and_never_idle(schedule: Schedule) -> None:
    peaks = prove(schedule).peak_in_flight
    for rank in range(schedule.stages):
        for size in (0, 1, 2, peaks[rank] - 1, peaks[rank], 99):
            for holding, room, kept in in_window(schedule, rank, max(0, size)):
                assert holding <= size
                assert kept == room
        everything = sliding_window(schedule, rank, peaks[rank])
        assert sum(map(len, everything)) == schedule.microbatches * schedule.chunks, (
            "all in flight fit: none is recomputed"
        )
    with pytest.raises(ValueError, match="size=-1 must be at least 0"):
        sliding_window(schedule, 0, -1)


def test_the_window_of_1f1b() -> None:
    """p = 4, m = 8, room for two: the first stage keeps 0 and 1, then those whose forward comes when one of them has ended."""
    schedule = build("1f1b", 4, 8)
    assert sliding_window(schedule, 0, 2) == (frozenset({0, 1, 4, 5}),)
    assert sliding_window(schedule, 2, 2) == (frozenset(range(8)),), "two in flight: both fit"


def test_how_many_fit() -> None:
    assert window_that_fits(400, in_flight=4, everything=100, recomputed=10, replay=90) == 4
    assert window_that_fits(399, 4, 100, 10, 90) == 2  # 2 x 100 + 2 x 10 + 90 = 310; a third would make 400
    assert window_that_fits(130, 4, 100, 10, 90) == 0
    with pytest.raises(ValueError, match=r"memory=129 is too little: 4 recomputed micro-batches hold 130"):
        window_that_fits(129, 4, 100, 10, 90)
    for memory in range(130, 401):
        k = window_that_fits(memory, 4, 100, 10, 90)
        assert k * 100 + (4 - k) * 10 + (90 if k < 4 else 0) <= memory
        assert k == 4 or (k + 1) * 100 + (3 - k) * 10 + (90 if k < 3 else 0) > memory
