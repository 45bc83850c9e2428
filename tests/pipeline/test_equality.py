"""Every layout against the dense reference."""

import pytest

from tests.pipeline.layouts import Layout, run_on_rank


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(pp=2, schedule="interleaved", chunks=2)])
def test_equal_to_the_dense_reference(layout, run_on_ranks):
    for result in run_on_ranks(layout.world, run_on_rank, layout, "reference"):
        print(result)
        assert max(result.values()) <= 1e-10
