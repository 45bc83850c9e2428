"""The planner: legal layouts, exact search, and Takeaway #1 from its own estimate."""

from dataclasses import replace

import pytest

from minimeg.cost import GPTShape, Job, Layout, alternatives, estimate, gpu, legal_layouts, model, plan
from minimeg.cost.planner import memory_bytes

A100 = gpu("a100-80g")
SMALL = Job(GPTShape(12, 512, 8, sequence=256, vocabulary=1000), 8, replace(A100, memory=4.35e9), 48)


# ---- layouts -----------------------------------------------------------------------------------------------------------------


def test_layouts_read_back():
    for layout in (*legal_layouts(SMALL), Layout(8, 64, 6, 2, 1, "none")):
        assert Layout.parse(str(layout)) == layout
    assert Layout.parse("full, p8 t4") == Layout(4, 8, 1, 1, 1, "full")
    assert Layout.parse("") == Layout(1, 1, 1, 1, 1, "selective")


def test_layouts_that_cannot_be_read():
    with pytest.raises(ValueError, match=r"'x3' is not of the form.*\n.*tensor is given twice"):
        Layout.parse("x3 t2 t4")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(0, 1, 8), "tensor=0 must be"),
        (Layout(1, 2, 4, 1, 1, "some"), "recompute='some' is unknown"),
        (Layout(3, 1, 1), "tensor=3 does not divide hidden=512"),
        (Layout(2, 2, 4), "tensor x pipeline x data = 16 is not gpus=8; use data=2"),
        (Layout(1, 8, 1), "pipeline x chunks = 8 does not divide layers=12"),
        (Layout(1, 2, 4, 5), "pipeline x chunks = 10 does not divide layers=12"),
        (Layout(2, 2, 2, 1, 16), "data x microbatch = 32 does not divide batch=48"),
        (Layout(8, 1, 1, 2), "chunks=2 with pipeline=1 saves nothing"),
        (Layout(2, 4, 1, 3, 8), "chunks=3 needs microbatches=6 to be a multiple of pipeline=4"),
    ],
)
def test_faults(layout, words):
    assert any(words in fault for fault in layout.faults(SMALL)), layout.faults(SMALL)


def test_sequence_parallelism_splits_the_sequence():
    job = replace(SMALL, shape=replace(SMALL.shape, sequence=255))
    assert any("does not divide sequence=255" in fault for fault in Layout(2, 1, 4).faults(job))
    assert not Layout(2, 1, 4).faults(replace(job, sequence_parallel=False))


def test_every_legal_layout_is_listed_once():
    found = list(legal_layouts(SMALL))
    tried = [
        Layout(t, p, d, n, b, recompute)
        for t in range(1, 9)
        for p in range(1, 9)
        for d in range(1, 9)
        for n in range(1, 13)
        for b in (1, 2, 4, 8, 16)
        for recompute in ("none", "selective", "full")
    ]
    assert sorted(found) == sorted(layout for layout in tried if not layout.faults(SMALL))


def test_a_job_names_its_faults():
    with pytest.raises(ValueError, match=r"gpus=0 .*\n.*batch=0 .*\n.*tokens=0 .*\n.*reserve="):
        Job(SMALL.shape, 0, A100, 0, 0, reserve=1e12)


# ---- search ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [1, 5, 30])
@pytest.mark.parametrize("adapter", [25e9, 0.05e9], ids=["tight bounds", "loose bounds"])
def test_the_search_is_exact(adapter, best):
    """On machines of two GPUs; with slow adapters messages delay more than the bounds know, so the order of bounds is another."""
    job = replace(SMALL, gpu=replace(SMALL.gpu, adapter=adapter, gpus_per_node=2))
    fitting = [layout for layout in legal_layouts(job) if memory_bytes(job, layout) <= job.gpu.memory]
    every = sorted((estimate(job, layout) for layout in fitting), key=lambda one: (one.seconds, one.layout))
    found = plan(job, best)
    assert [one.layout for one in found.best] == [one.layout for one in every[:best]]
    assert len(found.sizes) > len(found.candidates) == len(fitting)
    assert best <= found.simulated < len(fitting)
    by_bound = [layout for _, layout in found.candidates[:best]]
    assert best == 1 or adapter > 1e9 or by_bound != [one.layout for one in found.best]


def test_the_memory_that_filters_is_the_simulated_one():
    for layout in legal_layouts(SMALL):
        assert memory_bytes(SMALL, layout) == estimate(SMALL, layout).memory_bytes


def test_fewer_than_asked_for():
    found = plan(Job(SMALL.shape, 1, A100, 4), best=1000)
    assert len(found.best) == len(found.candidates) == found.simulated == 9


def test_nothing_fits_and_nothing_is_legal():
    tight = plan(replace(SMALL, gpu=replace(A100, memory=4.01e9)))
    assert tight.best == () == tight.candidates
    assert tight.sizes
    assert plan(replace(SMALL, gpus=7)).sizes == ()


# ---- what it finds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [32, 128])
def test_takeaway_1_of_narayanan(batch):
    """Figure 13 with d = 1, b = 1, full recomputation and no interleaving: tensor parallelism up to the node, then pipeline."""
    job = Job(model("162b").shape, 64, A100, batch, sequence_parallel=False)
    seconds = {
        (p, t): estimate(job, Layout(t, p, 1, 1, 1, "full")).seconds
        for p, t in ((2, 32), (4, 16), (8, 8), (16, 4), (32, 2))
    }
    assert min(seconds, key=seconds.get) == (8, 8)


def test_takeaway_1_of_the_whole_search():
    first = plan(Job(model("162b").shape, 64, A100, 128), best=1).best[0].layout
    assert (first.tensor, first.pipeline, first.data) == (8, 8, 1)


def test_gpt3_on_1024_gpus():
    found = plan(Job(model("gpt3-175b").shape, 1024, A100, 1536), best=5)
    assert all(one.fits for one in found.best)
    assert [one.seconds for one in found.best] == sorted(one.seconds for one in found.best)
    first = found.best[0]
    assert first.layout.tensor in (4, 8)  # never beyond a node
    assert 0.45 < first.mfu < 0.60
    assert 15 < first.days < 34  # the paper's 34 were with full recomputation
    assert found.simulated < len(found.candidates) / 20


def test_slower_links_change_the_best():
    """With slow NVLink, tensor parallelism is avoided."""
    job = Job(model("7.5b").shape, 128, A100, 512)
    slow = replace(job, gpu=replace(A100, nvlink=20e9))
    assert plan(job, 1).best[0].layout.tensor > plan(slow, 1).best[0].layout.tensor == 1


# ---- why ---------------------------------------------------------------------------------------------------------------------


def test_alternatives():
    found = plan(SMALL)
    first = found.best[0]
    others = alternatives(found)
    assert {other.choice.split()[0] for other in others} <= {"t", "p", "n", "b", "recompute"}
    assert sum(other.choice.startswith("recompute") for other in others) == 2
    letters = {"t": "tensor", "p": "pipeline", "n": "chunks", "b": "microbatch"}
    unfit = 0
    for other in others:
        name, value = other.choice.split(" = ") if "=" in other.choice else other.choice.split()
        field = letters.get(name, name)

        def chooses(layout, field=field, value=value):
            return str(getattr(layout, field)) == value

        assert not chooses(first.layout)
        fitting = [layout for _, layout in found.candidates if chooses(layout)]
        if not fitting:
            unfit += 1
            least, layout = min(pair for pair in found.sizes if chooses(pair[1]))
            assert other.estimate is None
            assert other.words == f"nothing fits: the smallest needs {least / 1e9:.1f} GB, with {layout}"
            continue
        best = min((estimate(SMALL, layout) for layout in fitting), key=lambda one: (one.seconds, one.layout))
        assert other.estimate == best
        assert other.words.startswith(f"{best.seconds - first.seconds:+.2f} s")
        assert other.words.endswith(f"with {best.layout}")
    assert unfit < len(others)


def test_alternatives_name_the_term_that_grows():
    found = plan(Job(model("gpt3-175b").shape, 1024, A100, 1536), best=1)
    full = next(other for other in alternatives(found) if other.choice == "recompute full")
    assert "(recomputation +" in full.words
