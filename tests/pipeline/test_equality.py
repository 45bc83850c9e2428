"""Every layout against the dense reference: forward, loss, every gradient, norm, and the parameters after three AdamW steps.

``python -m tests.pipeline.equivalence`` writes the same runs as the table in docs/.
"""

import pytest

from tests.pipeline.equivalence import LAYOUTS
from tests.pipeline.layouts import Layout, compare

BOUND = 1e-10


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
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
