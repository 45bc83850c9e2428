"""Megatron-LM's own orders, warm-ups, peaks in flight and makespans: every configuration of the extract, exactly."""

from itertools import takewhile

import pytest

from minimeg.schedule import Action, interleaved, one_f_one_b, prove, simulate

from .oracles import MEGATRON


def build(p, m, v, group):
    return one_f_one_b(p, m) if v == 1 else interleaved(p, m, v, group)


def identity(entry):
    return "p{p}-m{m}-v{v}-g{group}".format(**entry)


@pytest.mark.parametrize("entry", MEGATRON["schedules"], ids=identity)
def test_order_warmup_peak_and_makespan(entry):
    schedule = build(entry["p"], entry["m"], entry["v"], entry["group"])
    assert [[str(action) for action in row] for row in schedule.ranks] == [rank["order"] for rank in entry["ranks"]]
    for row, rank in zip(schedule.ranks, entry["ranks"], strict=True):
        leading = len(list(takewhile(lambda action: action.kind == "F", row)))
        # The first forward of the steady phase follows the warm-up without a backward between them.
        assert leading - (1 if rank["steady"] else 0) == rank["warmup"]
        assert rank["warmup"] + rank["steady"] == rank["total"] == entry["m"] * entry["v"]
    assert list(prove(schedule).peak_in_flight) == entry["peak_inflight"]
    timeline = simulate(schedule, 1, 2)
    assert timeline.makespan * entry["v"] == entry["makespan_tf1_tb2"]
    assert timeline.busy[0] * entry["v"] == pytest.approx(entry["ideal_busy_tf1_tb2"], rel=1e-14)
    assert list(timeline.peak_in_flight) == entry["peak_inflight"]


@pytest.mark.parametrize("entry", [e for e in MEGATRON["schedules"] if e["table"]], ids=identity)
def test_the_table_of_virtual_micro_batches(entry):
    schedule = build(entry["p"], entry["m"], entry["v"], entry["group"])
    n = entry["v"]
    for row in schedule.ranks:
        assert [a for a in row if a.kind == "F"] == [Action("F", m, c) for m, c in entry["table"]]
        assert [a for a in row if a.kind == "B"] == [Action("B", m, n - 1 - c) for m, c in entry["table"]]


@pytest.mark.parametrize("entry", MEGATRON["errors"], ids=identity)
def test_what_megatron_refuses_runs_here_unless_a_group_is_too_small(entry):
    p, m, v, group = (entry[key] for key in ("p", "m", "v", "group"))
    if group < p:
        with pytest.raises(ValueError, match=f"group_size={group} is smaller than stages={p}; use {p}"):
            interleaved(p, m, v, group)
    else:
        assert prove(interleaved(p, m, v, group)).messages == 2 * m * (p * v - 1)
