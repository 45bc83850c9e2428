"""Times, bubbles, memory, critical path; and that large schedules are quick."""

import itertools
import time

import pytest

from minimeg.schedule import (
    Action,
    Schedule,
    ScheduleError,
    Span,
    Timeline,
    build,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    prove,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)


def test_a_schedule_by_hand():
    """p=2 m=2, F=1 B=2, a message takes 1/2."""
    timeline = simulate(one_f_one_b(2, 2), 1, 2, comm=0.5)
    first, second = timeline.spans
    assert [(str(a), s, e) for a, s, e in first] == [
        ("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 5, 7), ("B0.1", 8, 10),
    ]  # fmt: skip
    assert [(str(a), s, e) for a, s, e in second] == [
        ("F0.0", 1.5, 2.5), ("B0.0", 2.5, 4.5), ("F0.1", 4.5, 5.5), ("B0.1", 5.5, 7.5),
    ]  # fmt: skip
    assert timeline.makespan == 10
    assert timeline.stage_spans == (10, 6)
    assert timeline.busy == (6, 6)
    assert timeline.bubble_of_ideal == pytest.approx(4 / 6)
    assert timeline.bubble_of_total == pytest.approx(4 / 10)


def test_times_are_those_of_a_whole_stage():
    for n in (1, 2, 3, 4):
        timeline = simulate(interleaved(4, 8, n), 1, 2)
        assert timeline.busy == pytest.approx((24,) * 4)
        span = timeline.spans[0][0]
        assert span.end - span.start == pytest.approx(1 / n)


def test_weight_gradients_belong_to_b_unless_split():
    assert simulate(one_f_one_b(4, 8), 1, 1, 1) == simulate(one_f_one_b(4, 8), 1, 2)
    kinds = {a.kind: end - start for a, start, end in simulate(zero_bubble_h1(4, 8), 1, 2, 4).spans[0]}
    assert kinds == {"F": 1, "B": 2, "W": 4}


def test_latency_counts_between_ranks_only():
    assert simulate(zero_bubble_v(1, 4), 2, 2, 2, comm=5).makespan == 24
    turn = simulate(zero_bubble_v(2, 4), 2, 2, 2, comm=5).spans[1]
    ends = {span.action: span for span in turn}
    assert ends[Action("F", 0, 0)].start == 6  # 1 on rank 0, then 5 on the way
    assert ends[Action("F", 0, 1)].start == 7  # handed over in memory


def test_one_time_per_rank():
    timeline = simulate(gpipe(2, 3), [1, 2], [3, 4])
    assert timeline.busy == (12, 18)
    assert timeline.bubble_of_ideal == (max(timeline.stage_spans) - 18) / 18  # ideal: what the busiest rank needs


@pytest.mark.parametrize(
    ("kwargs", "faults"),
    [
        ({"forward": [1, 2]}, ["forward has 2 times, there are 4 ranks"]),
        ({"forward": -1, "backward": float("nan"), "comm": -2}, ["forward=-1", "backward=nan", "comm=-2"]),
        ({"weight": float("inf")}, ["weight=inf"]),
    ],
)
def test_bad_times_are_all_named(kwargs, faults):
    with pytest.raises(ValueError) as error:
        simulate(one_f_one_b(4, 8), **kwargs)
    for fault in faults:
        assert fault in str(error.value)


def test_a_schedule_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="circle"):
        simulate(Schedule.parse("F0 B0 F1 B1\nF0 F1 B0 B1"))
    with pytest.raises(ScheduleError, match=r"F0\.1 is missing"):
        simulate(Schedule.parse("F0 B0 B1"))


def test_memory_of_a_split_schedule():
    timeline = simulate(zero_bubble_h2(4, 8), 1, 1, 1)
    assert timeline.peak_memory() == pytest.approx((7, 5, 3, 1))  # W holds nothing
    assert timeline.peak_memory(1, 1) == pytest.approx((7, 7, 7, 7))  # W holds all: the peak in flight
    assert timeline.peak_in_flight == (7, 7, 7, 7)
    assert timeline.peak_memory(10, 6) == pytest.approx((70, 62, 54, 46))


def test_memory_counts_chunks_as_parts_of_a_stage():
    timeline = simulate(interleaved(4, 8, 2))
    assert timeline.peak_in_flight == (11, 9, 7, 5)
    assert timeline.peak_memory(1) == pytest.approx((5.5, 4.5, 3.5, 2.5))
    assert timeline.peak_memory(1, 1) == timeline.peak_memory(1, 0)  # not split: nothing is left for W
    steps = timeline.memory(0)
    assert steps[0] == (0, 0.5)
    assert steps[-1] == (timeline.makespan, pytest.approx(0))


def test_forward_only_keeps_nothing():
    timeline = simulate(forward_only(4, 8))
    assert timeline.peak_in_flight == (0, 0, 0, 0)
    assert timeline.peak_memory() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "forward-only"]
)
@pytest.mark.parametrize("comm", [0, 0.25, 3.5])
def test_the_critical_path_accounts_for_the_makespan(name, comm):
    timeline = simulate(build(name, 4, 8), [1, 2, 1, 3], [2, 2, 4, 1], 1, comm)
    path = timeline.critical_path
    work = sum(span.end - span.start for _, span in path)
    jumps = sum(a != b for (a, _), (b, _) in itertools.pairwise(path))
    assert work + comm * jumps == pytest.approx(timeline.makespan)
    assert path[0] == (0, timeline.spans[0][0])
    assert path[-1][1].end == timeline.makespan
    for (a, before), (b, after) in itertools.pairwise(path):
        assert after.start == pytest.approx(before.end + (comm if a != b else 0))


def test_the_critical_path_names_the_slow_rank():
    timeline = simulate(one_f_one_b(4, 8), [1, 1, 5, 1], [2, 2, 10, 2])
    ranks = [rank for rank, _ in timeline.critical_path]
    assert ranks.count(2) == 16  # all of its work


def test_a_measured_timeline_is_a_timeline():
    """Spans of a real run: they start anywhere, with gaps."""
    schedule = one_f_one_b(2, 1)
    f, b = Action("F", 0), Action("B", 0)
    measured = Timeline(
        schedule,
        ((Span(f, 100.0, 101.0), Span(b, 106.0, 108.0)), (Span(f, 101.5, 102.5), Span(b, 103.0, 105.5))),
    )
    assert measured.makespan == 8
    assert measured.stage_spans == (8, 4)
    assert measured.busy == (3, 3.5)
    assert measured.bubble_of_ideal == pytest.approx(4.5 / 3.5)
    assert measured.peak_in_flight == (1, 1)
    assert measured.memory(1) == [(101.5, 1.0), (105.5, 0.0)]
    assert [(rank, str(span.action)) for rank, span in measured.critical_path] == [
        (0, "F0.0"), (1, "F0.0"), (1, "B0.0"), (0, "B0.0"),
    ]  # fmt: skip
    assert Timeline(schedule, ((), ())).makespan == 0
    assert Timeline(schedule, ((), ())).critical_path == ()


def test_timelines_compare_by_value():
    assert simulate(one_f_one_b(4, 8)) == simulate(one_f_one_b(4, 8))
    assert simulate(one_f_one_b(4, 8)) != simulate(one_f_one_b(4, 8), 2)


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def test_small_schedules_are_proven_and_simulated_at_once():
    """The issue's bound is 0.2 s for p=8 m=64 n=4; a widget redraws at every move of a slider."""
    schedule = interleaved(8, 64, 4)
    assert min(seconds(lambda: (prove(schedule), simulate(schedule))) for _ in range(3)) < 0.2


def test_large_schedules_are_proven_and_simulated_in_time():
    """64 stages x 1024 micro-batches x 8 chunks, a million actions, in under 20 s."""
    schedule = interleaved(64, 1024, 8)
    assert seconds(lambda: (prove(schedule), simulate(schedule))) < 20


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "forward-only"])
def test_mean_times_are_what_the_simulation_was_given(name):
    given = {"F": (1.0, 2.0, 3.0), "B": (2.0, 3.0, 5.0), "W": (1.0, 1.5, 0.5)}
    schedule = build(name, 3, 6)
    found = simulate(schedule, given["F"], given["B"], given["W"]).mean_times()
    if schedule.forward_only:
        expected = {"F": given["F"], "B": (0.0,) * 3, "W": (0.0,) * 3}
    elif schedule.split:
        expected = given
    else:
        expected = {"F": given["F"], "B": (3.0, 4.5, 5.5), "W": (0.0,) * 3}
    assert {kind: pytest.approx(times) for kind, times in expected.items()} == found


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "forward-only", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]
)
@pytest.mark.parametrize("comm", [0, 0.25])
def test_mean_times_are_what_simulate_takes(name, comm):
    """From a timeline back to the times of whole stages, per rank, and from these to the same timeline. Where there is no W, B is
    measured whole: backward + weight."""
    schedule = build(name, 3, 5)
    forward, backward, weight = [1, 2, 3], [2, 5, 4], [1, 1.5, 2]
    timeline = simulate(schedule, forward, backward, weight, comm)
    times = timeline.mean_times()
    whole = [0] * 3 if schedule.forward_only else backward
    if not schedule.split and not schedule.forward_only:
        whole = [b + w for b, w in zip(backward, weight, strict=True)]
    assert times["F"] == pytest.approx(forward)
    assert times["B"] == pytest.approx(whole)
    assert times["W"] == pytest.approx(weight if schedule.split else [0, 0, 0])
    again = simulate(schedule, times["F"], times["B"], times["W"], comm)
    for row, expected in zip(again.spans, timeline.spans, strict=True):
        assert [span.action for span in row] == [span.action for span in expected]
        assert [t for span in row for t in span[1:]] == pytest.approx([t for span in expected for t in span[1:]])
