"""Every layout against the dense reference: forward, loss, every gradient, norm, and the parameters after three AdamW steps.

``python -m tests.pipeline.equivalence`` writes the same runs as the table in docs/.
"""

import pytest

from tests.pipeline.equivalence import LAYOUTS
from tests.pipeline.layouts import Layout, compare

BOUND = 1e-10

# Fewer micro-batches than ranks, numbers of them that p does not divide, three ranks, three chunks, and the schedules that split the
# backward, with tied embeddings and with sequence parallelism.
ODD = [
    *(
        Layout(pp=2, schedule="interleaved", chunks=2, microbatches=m, tied=tied)
        for m in (1, 3)
        for tied in (True, False)
    ),
    Layout(tp=2, pp=2, schedule="interleaved", chunks=2, microbatches=3),
    Layout(dp=2, pp=2, schedule="interleaved", chunks=3, microbatches=5),
    Layout(pp=3, schedule="interleaved", chunks=2, microbatches=4, tied=False),
    Layout(pp=4, microbatches=2, tied=False),
    *(
        Layout(tp=tp, pp=2, schedule=name, chunks=chunks, microbatches=m, tied=tp == 1, sequence_parallel=tp == 2)
        for name, chunks in (("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2))
        for tp, m in ((1, 1), (1, 3), (2, 1), (2, 5))
    ),
]


@pytest.mark.parametrize("layout", [*LAYOUTS, *ODD], ids=lambda layout: f"{layout}-m{layout.microbatches}")
def test_equal_to_the_dense_reference_and_to_one_process(run_on_ranks, layout: Layout) -> None:
    results = run_on_ranks(layout.world, compare, layout)
    assert all((losses, norms) == results[0][:2] for losses, norms, _ in results), "not the same numbers on every rank"
    found = results[0][2]
    assert all(value == 0 if name.endswith("bits") else value <= BOUND for name, value in found.items()), found
    assert ("loss, bits" in found) == (layout.only_pipeline and not layout.tied)


def test_all_factorisations_are_here() -> None:
    sizes = {(layout.tp, layout.dp, layout.pp) for layout in LAYOUTS}
    assert len(sizes) == 20
    assert {t * d * p for t, d, p in sizes} == {1, 2, 4, 8}
    for tied in (True, False):
        assert {(ll.tp, ll.dp, ll.pp) for ll in LAYOUTS if ll.tied is tied} == sizes
