"""Every activation byte accounted for: a layer, a stage, a pipeline on real ranks beside the papers' formulas; 1T on paper."""

from __future__ import annotations

import contextlib
import gc
import io
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minimeg.comm import Group
from minimeg.cost import (
    GPTShape,
    extra_activation_bytes,
    first_stage_activation_bytes,
    interleaving_memory_factor,
    model,
    output_tensor_bytes,
)
from minimeg.data import MicroBatch
from minimeg.dry_run import imagine
from minimeg.memory import ActivationMemory, activation_memory
from minimeg.memory_table import (
    WHOLE,
    KeepsOutput,
    Row,
    describe,
    gather_rows,
    layers_formula,
    measure_layers,
    measure_step,
    part_of,
    stage_row,
    table,
)
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.models.recomputation import Recomputation, sliding_window, window_that_fits
from minimeg.options import Options
from minimeg.parallel_state import ParallelState, initialize_model_parallel, single_process
from minimeg.parameter import initialise
from minimeg.pipeline import run
from minimeg.schedule import Schedule, build, prove
from tests.cost.oracles import cases
from tests.rank_functions import tensor_group

S, B, H, A = 128, 2, 256, 8
SBH = S * B * H
CONFIG = GPTConfig(4, H, A, 256, S, hidden_dropout=0.1, attention_dropout=0.1)
SELECTIVE, FULL = Recomputation("selective"), Recomputation("full")
ALL_MODULES = Recomputation("selective", modules=("core_attn", "mlp", "layernorm"))

# ---- one layer -------------------------------------------------------------------------------------------------------------------


def paper(t: int, sp: bool) -> dict[Recomputation, float]:
    """Bytes of one layer in units of sbh, as published; written out once more here, apart from minimeg.cost."""
    core = 5 * A * S / H
    cut, whole = (34, 0) if sp else (24, 10)
    return {
        WHOLE: whole + cut / t + core / t,
        SELECTIVE: whole + cut / t,
        ALL_MODULES: (14 + 0) / t if sp else 6 + 8 / t,  # 16/t of the MLP and both norms' outputs are gone as well
        FULL: 2 / t if sp else 2,
        **({} if sp or t == 1 else {replace(FULL, distribute=True): 2 / t}),
    }


def rows_of(t: int, sp: bool) -> list[Row]:
    config = replace(CONFIG, sequence_parallel=sp)
    return [measure_layers(config, tensor_group(t), S, B, mode) for mode in paper(t, sp)]


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_bytes_of_a_layer(ranks: Any, t: int, sp: bool) -> None:
    """Korthikanti et al. 2022, equations 1, 2, 4, 6 and Table 2, on t real ranks: within 0.1 %, statistics of the norms apart."""
    expected = paper(t, sp)
    if not sp:
        assert expected[WHOLE] == 10 + 24 / t + 5 * A * S / (H * t)
    for rows in [rows_of(1, sp)] if t == 1 else ranks(t, rows_of, t, sp):
        for row, (mode, units) in zip(rows, expected.items(), strict=True):
            assert row.measured / SBH == pytest.approx(units, rel=1e-3), mode
            assert row.formula / SBH == pytest.approx(units, rel=1e-12), mode
            # Two norms, mean and deviation, 2 bytes a token each; replayed norms have none.
            statistics = 0 if mode in (FULL, ALL_MODULES) or mode.distribute else 4 * S * B * 2 // (t if sp else 1)
            assert row.statistics == statistics, mode


def test_groups_of_layers_hold_their_inputs() -> None:
    group = single_process().tp
    for method, k, units in (
        ("uniform", 1, 6),
        ("uniform", 2, 4),
        ("uniform", 3, 2),
        ("block", 1, 2 + 2 * 54),
        ("block", 2, 4 + 54),
    ):
        row = measure_layers(CONFIG, group, S, B, Recomputation("full", method, k), layers=3)
        assert row.measured / SBH == pytest.approx(units, rel=1e-3)
        assert row.formula / SBH == units
        assert row.what == f"full, {method} {k}"


def test_without_dropout_a_layer_holds_no_masks() -> None:
    """So the published figures are those of a model with dropout: 2 masks of 1, and 3as/h of the 5as/h."""
    config = replace(CONFIG, hidden_dropout=0.0, attention_dropout=0.0)
    row = measure_layers(config, single_process().tp, S, B)
    assert row.measured / SBH == pytest.approx(34 - 2 + 2 * A * S / H)


# ---- models that no machine here could hold --------------------------------------------------------------------------------------


@contextmanager
def on_paper(t: int) -> Iterator[Group]:
    """The tensor-parallel group of rank 0 of an imagined world of t."""
    if t == 1:
        yield single_process().tp
    else:
        with imagine(Options(tensor_model_parallel_size=t), 0, t) as state:
            yield state.tp


def on_meta(name: str, b: int, t: int, sp: bool = False, how: Recomputation = WHOLE, layers: int = 1) -> float:
    shape = model({"22B": "22b", "530B": "530b", "1T": "1t", "175B": "gpt3-175b"}[name]).shape
    config = GPTConfig(
        shape.layers, shape.hidden, shape.heads, shape.vocabulary, shape.sequence,
        hidden_dropout=0.1, attention_dropout=0.1, sequence_parallel=sp,
    )  # fmt: skip
    with on_paper(t) as group:
        return measure_layers(config, group, shape.sequence, b, how, layers, device="meta").measured


@pytest.mark.parametrize(
    "test", [t for t in cases("K1") if isinstance(t["inputs"], dict)], ids=lambda t: t["inputs"]["model"]
)
def test_k1_counted(test: Any) -> None:
    """Oracle K1, all values: the layers of 22B, 530B and 1T, built at full size on the meta device, and counted: exact."""
    i, expected = test["inputs"], test["expected"]
    ways = {
        "none": (1, False, WHOLE), "tp": (8, False, WHOLE), "tpsp": (8, True, WHOLE),
        "tpsel": (8, False, SELECTIVE), "tpspsel": (8, True, SELECTIVE), "full": (8, False, FULL),
    }  # fmt: skip
    assert {name: on_meta(i["model"], i["b"], *way) for name, way in ways.items()} == expected


def test_k1_ratios_counted() -> None:
    """5as/h = 64 for MT-NLG; selective saves 70 % and 65 %."""
    ratio, saving = (t for t in cases("K1") if isinstance(t["inputs"], str))
    sbh = 2048 * 20480
    assert (on_meta("530B", 1, 1) - on_meta("530B", 1, 1, how=SELECTIVE)) / sbh == ratio["expected"]
    for name, key in (("175B", "gpt3"), ("530B", "mtnlg")):
        saved = 1 - on_meta(name, 1, 8, True, SELECTIVE) / on_meta(name, 1, 8, True)
        assert saved == pytest.approx(saving["expected"][key], abs=saving["tol"])


def test_k2_equation_5_counted() -> None:
    """All L layers of 22B, 175B and 530B with t = 8 and sequence parallelism: what the first stage holds at any p."""
    expected = [t["expected"] for t in cases("K2")[2:5]]
    sizes = (("22B", 4, 48), ("175B", 1, 96), ("530B", 1, 105))
    assert [on_meta(name, b, 8, True, layers=layers) for name, b, layers in sizes] == expected


def test_k2_the_extras_of_22b_counted() -> None:
    """Beside its layers, a whole model holds 0.57 % more: the embedding's mask, two inputs of the head, logits in 32 bits."""
    (test,) = [t for t in cases("K2") if "ratio" in str(t["inputs"])]
    shape = model("22b").shape
    config = GPTConfig(
        2, shape.hidden, shape.heads, shape.vocabulary, shape.sequence,
        hidden_dropout=0.1, attention_dropout=0.1, sequence_parallel=True,
    )  # fmt: skip
    with on_paper(8) as group, torch.device("meta"):
        whole = GPT(config, group).bfloat16()
        tokens = torch.zeros(4, shape.sequence, dtype=torch.int64)
        microbatch = MicroBatch(tokens, tokens, tokens == 0, 0, 0)
        with activation_memory(whole) as m:
            loss = whole.loss(whole(None, microbatch), microbatch)
        ends = m.grouped(part_of)["ends"].live
        del loss
    layers = on_meta("22B", 4, 8, True, layers=48)
    assert extra_activation_bytes(shape, 4, 8) / layers == pytest.approx(test["expected"], abs=test["tol"])
    ids = (
        4 * shape.sequence * 64
    )  # the papers leave out what a token costs whatever h is: its id, its target, its masks
    assert 0 <= ends - extra_activation_bytes(shape, 4, 8) <= ids
    assert ends / layers == pytest.approx(test["expected"], rel=5e-3)


# ---- a pipeline ------------------------------------------------------------------------------------------------------------------

SMALL = GPTConfig(8, 64, 4, 64, 64, hidden_dropout=0.1, attention_dropout=0.1)  # s = h, a = 4: 5as/h = 20, COURSE 11
UNIT = 64 * 2 * 64


def batch_of(m: int, length: int = 64, b: int = 2) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for i in range(m):
        tokens = torch.randint(64, (b, length), generator=generator)
        result.append(MicroBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), i, 0))
    return result


def chunks_of(
    config: GPTConfig, schedule: Schedule, state: ParallelState, how: Recomputation = WHOLE, window: int = 0
) -> list[GPT]:
    kept = sliding_window(schedule, state.pp.rank, window)
    chunks = [
        GPT(
            config,
            state.tp,
            schedule.virtual_stage(state.pp.rank, c),
            schedule.virtual_stages,
            7,
            replace(how, kept=kept[c]),
        )
        for c in range(schedule.chunks)
    ]
    initialise(chunks, 3)
    return [chunk.bfloat16() for chunk in chunks]


def rows_of_a_pipeline(
    config: GPTConfig, p: int, name: str, n: int, m: int, how: Recomputation
) -> tuple[list[Row], str]:
    state, schedule = initialize_model_parallel(1, p), build(name, p, m, chunks=n)
    gc.collect()
    length = config.max_sequence_length
    memory = measure_step(schedule, chunks_of(config, schedule, state, how), batch_of(m, length), state.pp)
    assert memory.live == 0
    labels = memory.labels()
    assert set(labels) == {f"micro-batch {i}" for i in range(m)}
    assert all(size.live == 0 < size.peak for size in labels.values())
    per_chunk = config.num_layers // (p * n)
    chunk = layers_formula(config, length, 2, 1, how, per_chunk)
    # While a layer is replayed, its insides are there, but its input is held already.
    replay = layers_formula(config, length, 2, 1) - chunk / per_chunk if how.granularity == "full" else 0
    rows = gather_rows(stage_row(memory, schedule, state.pp.rank, chunk, replay), state.pp)
    return rows, table(rows, length * 2 * config.hidden_size)


@pytest.mark.parametrize(
    ("name", "n", "m", "how", "first"),
    [
        ("1f1b", 1, 8, WHOLE, 4 * 2 * 54),
        ("gpipe", 1, 8, WHOLE, 8 * 2 * 54),
        ("interleaved", 2, 8, WHOLE, 11 * 54),
        ("1f1b", 1, 8, SELECTIVE, 4 * 2 * 34),
        ("1f1b", 1, 8, FULL, 4 * 2 * 2 + 52),
        ("interleaved", 2, 8, FULL, 11 * 2 + 52),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else describe(value) if isinstance(value, Recomputation) else str(value)
    ),
)
def test_bytes_of_a_pipeline(ranks: Any, name: str, n: int, m: int, how: Recomputation, first: int) -> None:
    """COURSE 11 with L = 8: the layers of every stage within 0.1 % of (in flight) x (layers of a chunk) x (bytes of a layer)."""
    results = ranks(4, rows_of_a_pipeline, SMALL, 4, name, n, m, how)
    rows, text = results[0]
    assert all(other == rows for other, _ in results)
    for row in rows:
        assert row.measured == pytest.approx(row.formula, rel=1e-3), text
    assert rows[0].measured / UNIT == pytest.approx(first, rel=1e-3)
    if name == "1f1b" and how is WHOLE:
        assert [row.measured / UNIT for row in rows] == pytest.approx([432, 324, 216, 108], rel=1e-3)
        assert first == first_stage_activation_bytes(GPTShape(8, 64, 4, 64, 64), 2, pipeline=4) / UNIT, (
            "the same for every p"
        )
    if n > 1 and how is WHOLE:
        assert rows[0].measured / UNIT / 432 == pytest.approx(interleaving_memory_factor(4, 2), rel=1e-3)


def test_k2_interleaving_counted(ranks: Any) -> None:
    """Oracle K2: p = 8, three chunks a rank: the first stage holds 1 + 7/24 = 1.2917 of what it holds under 1F1B."""
    tiny = GPTConfig(24, 16, 2, 64, 16, hidden_dropout=0.1, attention_dropout=0.1)
    plain, _ = ranks(8, rows_of_a_pipeline, tiny, 8, "1f1b", 1, 16, WHOLE)[0]
    interleaved, _ = ranks(8, rows_of_a_pipeline, tiny, 8, "interleaved", 3, 16, WHOLE)[0]
    (test,) = [t for t in cases("K2")[:2] if t["inputs"]["p"] == 8]
    assert interleaved[0].measured / plain[0].measured == pytest.approx(test["expected"], abs=test["tol"])
    assert [row.measured / plain[0].measured for row in plain] == pytest.approx([(8 - r) / 8 for r in range(8)])


# ---- the window fills the memory there is ----------------------------------------------------------------------------------------


def peak_with_budget(budget: float) -> tuple[int, int, float]:
    """Micro-batches that are kept, the measured peak of the layers, and what was in flight."""
    state, schedule = initialize_model_parallel(1, 4), build("1f1b", 4, 8)
    everything, recomputed = (layers_formula(SMALL, 64, 2, 1, how, 2) for how in (WHOLE, FULL))
    in_flight = prove(schedule).peak_in_flight[state.pp.rank]
    window = window_that_fits(budget, in_flight, everything, recomputed, replay=52 * UNIT)
    memory = measure_step(schedule, chunks_of(SMALL, schedule, state, FULL, window), batch_of(8), state.pp)
    return window, memory.grouped(part_of)["layers"].peak, everything


@pytest.mark.parametrize("units", [80, 200, 300, 431, 432])
def test_the_window_fills_the_memory_there_is(ranks: Any, units: int) -> None:
    """Appendix C: with a budget of so many sbh, each stage keeps as many micro-batches as fit, and no stage exceeds it."""
    found = ranks(4, peak_with_budget, units * UNIT)
    for rank, (window, peak, everything) in enumerate(found):
        assert peak <= units * UNIT
        assert window == 4 - rank or peak + everything > units * UNIT, "one more would not have fit"
    windows = [window for window, _, _ in found]
    assert (
        windows == {80: [0, 0, 0, 0], 200: [1, 1, 1, 1], 300: [2, 2, 2, 1], 431: [3, 3, 2, 1], 432: [4, 3, 2, 1]}[units]
    )


# ---- what freeing sent outputs saves ---------------------------------------------------------------------------------------------


def with_and_without_freeing() -> tuple[int, list[tuple[int, bool]]]:
    """This rank's place, and for outputs freed or kept: the peak of everything, and whether the gradients are bit-equal."""
    state, schedule = initialize_model_parallel(1, 4), build("1f1b", 4, 8)
    found, grads = [], []
    for keeps in (False, True):
        stages: list[nn.Module] = [KeepsOutput(c) if keeps else c for c in chunks_of(SMALL, schedule, state)]
        memory = measure_step(schedule, stages, batch_of(8), state.pp)
        grads.append([p.grad for stage in stages for p in stage.parameters()])
        found.append((memory.peak, all(torch.equal(a, b) for a, b in zip(grads[0], grads[-1], strict=True))))
    return state.pp.rank, found


def test_what_freeing_sent_outputs_saves(ranks: Any) -> None:
    """Korthikanti et al. 2022, appendix B: 2 sbh for each micro-batch in flight, p of them on the first stage. CASES 54."""
    shape = GPTShape(8, 64, 4, 64, 64)
    for rank, ((freed, equal), (kept, equal_too)) in ranks(4, with_and_without_freeing):
        assert equal
        assert equal_too
        if rank < 3:
            assert kept - freed == output_tensor_bytes(shape, 2, 4 - rank) == 2 * UNIT * (4 - rank)


class Odd(nn.Module):
    """A stage whose output is a view, a part, or its input plus something. Notes the storages of what it puts out."""

    def __init__(self, kind: str, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5, dtype=torch.float64))
        self.kind, self.first = kind, first
        self.storages: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def input_shape(self, microbatch: Any) -> Any:
        return (3, 4), torch.float64

    output_shape = input_shape

    def forward(self, x: Tensor | None, microbatch: Tensor) -> Tensor:
        x = microbatch if x is None else x
        y = (x @ self.weight).tanh()
        out = {
            "view": lambda: y.view(-1).view(3, 4),
            "part": lambda: torch.cat([y, y], 1)[:, 2:6],
            "residual": lambda: x + y,
            "transposed": lambda: (self.weight @ x.t()).t(),
        }[self.kind]()
        self.alive.append(sum(not storage.expired() for storage in self.storages))
        self.storages.append(StorageWeakRef(out.untyped_storage()))
        return out

    def loss(self, out: Tensor, microbatch: Any) -> Tensor:
        return out.square().sum()


def odd_outputs(kind: str) -> tuple[int, list[Tensor], list[int], int]:
    """Gradients of a run over two ranks, outputs still alive at each forward, and at the end."""
    state, m = initialize_model_parallel(1, 2), 6
    stage = Odd(kind, state.pp.rank == 0)
    batch = [torch.full((3, 4), 0.1 * i + 0.1, dtype=torch.float64) for i in range(m)]
    run(build("1f1b", 2, m), [stage], batch, group=state.pp, loss=stage.loss, normaliser=1.0)
    whole = [Odd(kind, True), Odd(kind, False)]
    for x in batch:  # nothing freed: one graph
        whole[1].loss(whole[1](whole[0](None, x), x), x).backward()
    assert stage.weight.grad is not None
    return state.pp.rank, [stage.weight.grad, whole[state.pp.rank].weight.grad], stage.alive, sum(
        not storage.expired() for storage in stage.storages
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["view", "part", "residual", "transposed"])
def test_outputs_of_every_kind_are_freed(ranks: Any, kind: str) -> None:
    """CASES 54: views and parts need no special case; once a send has been waited for, the storage is gone."""
    for rank, (mine, expected), alive, left in ranks(2, odd_outputs, kind):
        assert torch.equal(mine, expected)
        assert left == 0
        if rank == 0 and kind in ("residual", "transposed"):  # tanh saves its result, of which "view" is a view
            assert max(alive) <= 2, "at most what is on its way"


# ---- in words --------------------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    rows = [Row("none", 54_000, 54_000, 31), Row("full, uniform 1", 2_002, 2_000)]
    lines = table(rows, 1000).splitlines()
    assert lines[0].split() == ["measured", "formula", "apart", "by", "statistics"]
    assert lines[1].split() == ["none", "54.000", "54.000", "0.000%", "0.031"]
    assert lines[2].split() == ["full,", "uniform", "1", "2.002", "2.000", "0.100%", "0.000"]
    assert len({len(line) for line in lines}) == 1
    assert table([Row("nothing", 0, 0)], 1).splitlines()[1].split() == ["nothing", "0.000", "0.000", "0.000%", "0.000"]
    assert describe(Recomputation("selective", modules=("mlp", "layernorm"))) == "selective mlp layernorm"
    assert describe(replace(FULL, method="block", num_layers=2, distribute=True)) == "full, block 2, distributed"
    assert describe(WHOLE) == "none"


def demo() -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module("minimeg.demos.activation_memory", run_name="__main__")
    return out.getvalue().splitlines()


def test_the_demo(ranks: Any) -> None:
    lines, *others = ranks(4, demo)
    assert others == [[]] * 3, "one rank speaks for all"
    assert "none                          21.000       21.000    0.000%       0.031" in lines
    assert "rank 0, 11 in flight      594.000      594.000    0.000%       0.344" in lines


def test_every_formula_of_the_package_is_that_of_the_paper() -> None:
    for t, sp in product((1, 2, 4, 8), (False, True)):
        config = replace(CONFIG, sequence_parallel=sp)
        for how, units in paper(t, sp).items():
            assert layers_formula(config, S, B, t, how) == pytest.approx(units * SBH)


def test_memory_of_nothing() -> None:
    row = stage_row(ActivationMemory(), build("1f1b", 1, 1), 0, 0.0)
    assert row == Row("rank 0, 1 in flight", 0, 0.0, 0)
