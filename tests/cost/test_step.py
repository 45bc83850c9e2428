"""The estimate of time: held against 25 published iterations, none of which it was fitted to, and against itself."""

from dataclasses import replace

import pytest

from minimeg.cost import GPTShape, Job, Layout, estimate, gpu, model
from minimeg.cost.estimate import lower_bound
from minimeg.cost.layout import legal_layouts
from minimeg.cost.memory import total
from minimeg.cost.step import StageWork, Work, elementwise_bytes, layer_work, message_seconds, once_per_step, stage_work

from .oracles import PAPERS, rows

A100 = gpu("a100-80g")
NAMES = {"22B": "22b", "175B": "gpt3-175b", "530B": "530b", "1T": "1t"}


def near(found, published, percent):
    print(f"{found:9.3f} estimated {published:9.3f} published {found / published:6.3f}")
    assert found == pytest.approx(published, rel=percent / 100)


@pytest.mark.parametrize("present", [False, True], ids=["full", "present"])
@pytest.mark.parametrize("row", rows("K3"), ids=lambda row: row["model"])
def test_table_5_of_korthikanti(row, present):
    """Full recomputation as before; sequence parallelism and selective recomputation at present."""
    shape = model(NAMES[row["model"]]).shape
    layout = Layout(8, row["pp"], 1, row["interleave"], row["microbatch"], "selective" if present else "full")
    job = Job(shape, row["gpus"], A100, row["global_batch"], sequence_parallel=present, distributed_optimizer=False)
    one = estimate(job, layout)
    near(one.seconds, row["iter_present_s" if present else "iter_full_recompute_s"], 10)
    assert one.fits


def test_korthikanti_on_2240_gpus():
    scaled = PAPERS["K3"]["data"]["scaled_530B_8dp"]
    job = Job(model("530b").shape, 2240, A100, 2240, distributed_optimizer=False)
    one = estimate(job, Layout.parse("t8 p35 d8 n3 selective"))
    near(one.seconds, scaled["iter_s"], 2)
    near(100 * one.mfu, scaled["mfu_pct"], 2)


@pytest.mark.parametrize(
    "row", [r for r in rows("N5") if r["scheme"] == "PTD"], ids=lambda r: f"{r['params_b']}-{r['gpus']}"
)
def test_table_2_of_narayanan(row):
    ranks = row["model_parallel"]
    job = Job(
        GPTShape(row["l"], row["h"], {96: 96, 280: 128}[ranks]),
        row["gpus"],
        A100,
        row["batch"],
        sequence_parallel=False,
        distributed_optimizer=False,
    )
    one = estimate(job, Layout(8, ranks // 8, row["gpus"] // ranks, 1, row["microbatch"], "full"))
    near(one.hfu * 312, row["tflops_per_gpu"], 6)
    near(one.days, row["days_for_300B"], 6)


@pytest.mark.parametrize("row", rows("N1"), ids=lambda row: str(row["params_b"]))
def test_table_1_of_narayanan(row):
    """Micro-batch and chunks are not printed: 1 and 1."""
    shape = GPTShape(row["layers"], row["hidden"], row["heads"])
    job = Job(shape, row["gpus"], A100, row["batch"], sequence_parallel=False, distributed_optimizer=False)
    one = estimate(job, Layout(row["tp"], row["pp"], row["dp_derived"], 1, 1, "full"))
    near(one.hfu * 312, row["tflops_per_gpu"], 7)
    near(one.seconds, row["iter_s_derived"], 7)


@pytest.mark.parametrize("row", [(i, *row) for i, row in enumerate(rows("K4"))], ids=lambda row: row[1])
def test_table_4_of_korthikanti_to_which_the_efficiencies_were_set(row):
    number, _, forward, backward, *_ = row
    sequence_parallel, recompute = [
        (False, "none"),
        (True, "none"),
        (False, "full"),
        (False, "selective"),
        (True, "selective"),
    ][number]
    job = Job(model("22b").shape, 8, A100, 4, sequence_parallel=sequence_parallel)
    work = layer_work(job, Layout(8, 1, 1, 1, 4, recompute))
    near(1e3 * work.forward_seconds, forward, 5)
    near(1e3 * work.backward_seconds, backward, 14)


# ---- the parts ---------------------------------------------------------------------------------------------------------------

SMALL = GPTShape(layers=8, hidden=64, heads=8, sequence=32, vocabulary=128)
# Round speeds, so that seconds can be counted by hand.
UNIT = replace(
    A100,
    matmul=1e9,
    memory_bandwidth=1e9,
    nvlink=1e9,
    adapter=1e8,
    matmul_efficiency=1.0,
    memory_efficiency=1.0,
    link_efficiency=1.0,
)
JOB = Job(SMALL, 16, UNIT, 32)
SBH = 32 * 1 * 64


def test_elementwise_bytes():
    core = 9 * 8 * 32 * 32
    assert elementwise_bytes(SMALL, 1, 1, False) == 38 * SBH + core
    assert elementwise_bytes(SMALL, 1, 2, False) == 22 * SBH + 8 * SBH + core // 2
    assert elementwise_bytes(SMALL, 1, 2, True) == 19 * SBH + core // 2


def test_one_layer():
    layer, core = 24 * 32 * 64 * 64 + 4 * 32 * 32 * 64, 4 * 32 * 32 * 64
    ring = 2 * (2 * SBH) * 2 * (1 / 2) / 1e9  # two all-reduces of 2 sbh bytes over two ranks
    moved = (19 * SBH + 9 * 8 * 32 * 32 // 2) / 1e9
    once = Work(layer / 2 / 1e9, moved, ring)
    for recompute, again in (
        ("none", Work()),
        ("selective", Work(core / 2e9, 9 * 8 * 32 * 32 // 2 / 1e9)),
        ("full", once),
    ):
        work = layer_work(JOB, Layout(2, 2, 4, 1, 1, recompute))
        assert work.forward == once
        assert work.backward == Work(2 * once.matmul, 2 * once.elementwise, once.tensor)
        assert work.again == again


def test_stages():
    layout = Layout(2, 4, 2, 1, 1, "selective")
    first, middle, last = (stage_work(JOB, layout, stage) for stage in (0, 1, 3))
    layer = layer_work(JOB, layout)
    assert middle == StageWork(layer.forward * 2, layer.backward * 2, layer.again * 2)
    all_reduce = 2 * SBH / 1e9
    assert first.forward.tensor - middle.forward.tensor == pytest.approx(all_reduce)
    assert first.backward == middle.backward
    output = 2 * 32 * 64 * 128 / 2 / 1e9
    assert last.forward.matmul - middle.forward.matmul == pytest.approx(output)
    assert last.backward.matmul - middle.backward.matmul == pytest.approx(2 * output)
    assert last.backward.tensor - middle.backward.tensor == pytest.approx(all_reduce)
    logits = 4 * 32 * 128 / 2 / 1e9
    assert last.forward.elementwise - middle.forward.elementwise == pytest.approx(3 * logits)
    assert last.backward.elementwise - middle.backward.elementwise == pytest.approx(2 * logits)


def test_messages_and_what_comes_once():
    layout = Layout(2, 4, 2)
    assert message_seconds(JOB, layout) == 2 * SBH / 2 / 1e8
    held = 2 * (12 * 64 * 64 // 2 + 7 * 64 // 2 + 6 * 64) + 64 * 64 + 32 * 64
    terms = {term.name: term.value for term in once_per_step(JOB, layout)}
    assert terms["gradients (dp)"] == pytest.approx((4 + 2) * held / 2 / 1e9)
    assert terms["tied embedding"] == pytest.approx(4 * 64 * 64 / 1e8)
    assert terms["optimizer"] == pytest.approx(30 * held / 2 / 1e9)
    replicated = {t.name: t.value for t in once_per_step(replace(JOB, distributed_optimizer=False), layout)}
    assert replicated["gradients (dp)"] == pytest.approx(4 * held / 1e9)
    assert replicated["optimizer"] == pytest.approx(30 * held / 1e9)
    assert "tied embedding" not in {term.name for term in once_per_step(JOB, Layout(2, 1, 8))}


# ---- one layout --------------------------------------------------------------------------------------------------------------

EVERY = list(legal_layouts(JOB))


def test_the_terms_add_up():
    for layout in EVERY:
        one = estimate(JOB, layout)
        assert total(one.time_terms) == pytest.approx(one.seconds)
        assert all(term.value >= -1e-12 for term in one.time_terms), layout
        assert total(one.memory[1]) == one.memory_bytes


def test_equal_stages_have_the_closed_forms_bubble():
    """Without output layer and embedding worth mentioning, and with free messages."""
    shape = replace(SMALL, vocabulary=1, layers=64)
    for layout in (Layout(1, 4, 4), Layout(1, 4, 4, 2), Layout(1, 8, 2, 1), Layout(1, 8, 2, 4)):
        one = estimate(Job(shape, 16, UNIT, 64), layout)
        expected = (layout.pipeline - 1) / (layout.chunks * layout.microbatches(64))
        assert one.bubble == pytest.approx(expected, rel=1e-3)


def test_bounds_are_below_the_simulation():
    for layout in EVERY:
        assert lower_bound(JOB, layout) <= estimate(JOB, layout).seconds * (1 + 1e-12)
    closest = max(lower_bound(JOB, layout) / estimate(JOB, layout).seconds for layout in EVERY if layout.pipeline > 1)
    assert closest > 0.98


def test_mfu_hfu_and_days():
    one = estimate(JOB, Layout(2, 2, 4, 1, 1, "full"))
    assert one.mfu < one.hfu < 1
    tokens = 32 * 32 * 1000
    assert estimate(replace(JOB, tokens=tokens), one.layout).days == pytest.approx(1000 * one.seconds / 86400)
    none = estimate(JOB, Layout(2, 2, 4, 1, 1, "none"))
    assert none.mfu == none.hfu


def test_the_memory_of_the_fullest_rank():
    gpt3 = Job(model("gpt3-175b").shape, 1024, A100, 1536)
    stage, terms = estimate(gpt3, Layout.parse("t8 p8 d16 n3 b1 selective")).memory
    values = {term.name: term.value for term in terms}
    sbh = 2048 * 12288
    assert stage == 0
    assert values["weights, gradients, optimizer"] == 2_822_731_776 * (6 + 12 / 16)
    assert values["activations of layers"] == 31 * 4 * 34 * sbh // 8
    assert values["dropout mask of the embedding"] == 8 * sbh // 8
    assert values["the attention being replayed"] == 5 * 96 * 2048**2 // 8
    assert values["reserve"] == 4e9
    assert len(values) == 5


def test_the_last_rank_can_be_the_fullest():
    shape = GPTShape(layers=4, hidden=64, heads=4, sequence=64, vocabulary=500_000)
    job = Job(shape, 4, A100, 16)
    stage, terms = estimate(job, Layout(1, 4, 1, 1, 4, "full")).memory
    values = {term.name: term.value for term in terms}
    sb = 64 * 4
    assert stage == 3
    assert values["last norm, output layer, logits"] == 4 * sb * 64 + 4 * sb * 500_000
    assert values["the layer being replayed"] == (34 + 5 * 4 * 64 / 64 - 2) * sb * 64


def test_an_illegal_layout_is_refused():
    with pytest.raises(
        ValueError, match=r"layout t8 p3 d1 n1 b1 selective:\n.*is not gpus=16.*\n.*does not divide layers=8"
    ):
        estimate(JOB, Layout(8, 3, 1))
