"""Every order: proven, in the order of accumulation, with the peak in flight and the makespan of its formula."""

from collections import defaultdict
from itertools import product

import pytest

from minimeg.schedule import (
    NAMES,
    Action,
    build,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    prove,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)


def every_order(p, m, chunks, groups):
    """All schedules of p ranks and m micro-batches; interleaved with n in ``chunks`` and g = p + each of ``groups``."""
    yield from (builder(p, m) for builder in (gpipe, one_f_one_b, pipedream))
    yield from (builder(p, m) for builder in (zero_bubble_h1, zero_bubble_h2, zero_bubble_v, dualpipe_v))
    if m >= p:
        yield pipedream_2bw(p, m)
    for n in chunks:
        yield forward_only(p, m, n)
        yield from (interleaved(p, m, n, p + more) for more in groups)
    yield forward_only(p, m, 2, "v")


def expect_in_order(schedule):
    """F, B and W of every chunk go 0..m-1: gradients are summed as in one process."""
    for row in schedule.ranks:
        seen = defaultdict(list)
        for action in row:
            seen[action.kind, action.chunk].append(action.microbatch)
        kinds = "F" if schedule.forward_only else "FBW" if schedule.split else "FB"
        assert set(seen) == set(product(kinds, range(schedule.chunks)))
        assert all(order == list(range(schedule.microbatches)) for order in seen.values())


def expect_peak(schedule, peaks):
    p, m, n = schedule.stages, schedule.microbatches, schedule.chunks
    match schedule.name:
        case "gpipe":
            assert peaks == (m,) * p
        case "1f1b" | "pipedream" | "pipedream-2bw":
            assert peaks == tuple(min(p - r, m) for r in range(p))
        case "forward-only":
            assert peaks == (0,) * p
        case "zb-h1":
            assert max(peaks) <= p
        case "zb-h2":
            assert peaks == (2 * p - 1,) * p if m >= 2 * p - 1 else max(peaks) <= m
        case "zb-v":
            assert peaks == (2 * p,) * p if m >= 2 * p else max(peaks) <= 2 * p
        case "dualpipe-v":
            assert peaks == (2 * p + 1,) * p if m > 2 * p else max(peaks) <= 2 * p + 1
        case "interleaved":
            assert max(peaks) <= m * n
        case name:
            pytest.fail(f"{name} has no formula here")


def expect_makespan(schedule):
    p, m, n = schedule.stages, schedule.microbatches, schedule.chunks
    if schedule.name in ("gpipe", "1f1b", "pipedream", "pipedream-2bw"):
        assert simulate(schedule, 2, 3).makespan == (m + p - 1) * 5
    elif schedule.name == "zb-v" and m >= 2 * p:
        assert simulate(schedule, 2, 2, 2).stage_spans == (6 * m,) * p
    elif schedule.name == "zb-h2" and m >= 2 * p - 1:
        assert simulate(schedule, 1, 1, 1).stage_spans == (3 * m,) * p
    elif schedule.name == "zb-h1" and m >= p:
        assert simulate(schedule, 1, 1, 1).makespan == 3 * m + p - 1
    elif schedule.name == "interleaved" and m % p == 0:
        assert simulate(schedule, n, 2 * n).makespan >= (m * n + p - 1) * 3


def check(schedule):
    expect_in_order(schedule)
    proof = prove(schedule)
    turn = 1 if schedule.placement == "v" else 0  # in a "v" one boundary lies inside a rank, with one rank all do
    boundaries = 0 if schedule.stages == 1 else schedule.stages * schedule.chunks - 1 - turn
    assert proof.messages == boundaries * schedule.microbatches * (1 if schedule.forward_only else 2)
    expect_peak(schedule, proof.peak_in_flight)
    expect_makespan(schedule)


@pytest.mark.parametrize("p", range(1, 9))
def test_every_order_is_proven(p):
    for m in range(1, 25):
        for schedule in every_order(p, m, range(1, 5), groups=(0, 1 + m % (p + 2))):
            check(schedule)


@pytest.mark.soak
@pytest.mark.parametrize("p", range(1, 17))
def test_every_order_is_proven_up_to_16_ranks(p):
    for m in range(1, 65):
        for schedule in every_order(p, m, range(1, 5), groups=(0, 1, p + 2)):
            check(schedule)


@pytest.mark.parametrize(("p", "m", "n"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 9, 3), (8, 16, 2)])
def test_interleaved_formulas(p, m, n):
    """Whole groups: rank r holds one more than its warm-up, and the makespan is (m n + p - 1) pairs of chunk actions."""
    schedule = interleaved(p, m, n)
    warmups = [min(2 * (p - r - 1) + (n - 1) * p, m * n) for r in range(p)]
    assert prove(schedule).peak_in_flight == tuple(min(w + 1, m * n) for w in warmups)
    timeline = simulate(schedule, n, 2 * n)
    assert timeline.makespan == (m * n + p - 1) * 3
    assert timeline.bubble_of_ideal == pytest.approx((p - 1) / (m * n))


def test_incomplete_groups_leave_out_the_absent_micro_batches():
    """The order of m=8 without micro-batches 6 and 7."""
    whole, part = interleaved(4, 8, 2), interleaved(4, 6, 2)
    assert part.ranks == tuple(tuple(a for a in row if a.microbatch < 6) for row in whole.ranks)
    assert interleaved(4, 3, 2, group_size=6).microbatches == 3  # g > m is allowed
    assert interleaved(4, 8, 2, group_size=4) == whole


def test_forward_only_of_a_loop_fills_chunk_after_chunk():
    assert forward_only(2, 3, 2).ranks == ((*map(Action.parse, ["F0.0", "F0.1", "F1.0", "F1.1", "F0.2", "F1.2"]),),) * 2
    for p, m in product(range(1, 9), range(1, 17)):
        assert simulate(forward_only(p, m)).makespan == m + p - 1


def test_forward_only_of_a_v_turns_round():
    schedule = forward_only(3, 5, 2, "v")
    assert schedule.placement == "v"
    assert " ".join(map(str, schedule.ranks[0])) == "F0.0 F0.1 F0.2 F0.3 F0.4 F1.0 F1.1 F1.2 F1.3 F1.4"
    assert " ".join(map(str, schedule.ranks[2])) == "F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F0.3 F1.3 F0.4 F1.4"
    for p, m in product(range(1, 9), range(2, 17)):
        # Either chunk is a pipe of its own, and at the turn both pass the same rank.
        assert simulate(forward_only(p, m, 2, "v"), 2).makespan == 2 * m + 2 * p - 2


def test_dualpipe_v_of_fewer_micro_batches_than_it_needs():
    assert prove(dualpipe_v(4, 1)).messages == 2 * 6


@pytest.mark.parametrize(
    ("wrong", "faults"),
    [
        (lambda: one_f_one_b(0, -1), ["stages=0", "microbatches=-1"]),
        (lambda: gpipe(2.0, 4), ["stages=2.0"]),
        (lambda: zero_bubble_v(4, True), ["microbatches=True"]),
        (lambda: interleaved(4, 8, 0), ["chunks=0"]),
        (lambda: interleaved(4, 8, 2, 3), ["group_size=3", "stages=4", "use 4 or more"]),
        (lambda: interleaved(4, 8, 2, 0), ["group_size=0"]),
        (lambda: interleaved(0, 0, 0, 0), ["stages=0", "microbatches=0", "chunks=0", "group_size=0"]),
        (lambda: forward_only(2, 2, 3, "v"), ["chunks=3", "use chunks=2 or placement='loop'"]),
        (lambda: forward_only(0, 2, 2, "w"), ["stages=0", "placement='w'"]),
        (lambda: pipedream_2bw(4, 3), ["microbatches=3", "stages=4", "use 4 or more"]),
        (lambda: build("1f1d", 4, 8), ["'1f1d' is unknown", "1f1b", "zb-v"]),
        (lambda: build("gpipe", 4, 8, 2, 4), ["chunks=2: gpipe has 1 a rank", "group_size=4 is for interleaved only"]),
        (lambda: build("zb-v", 4, 8, 3), ["chunks=3: zb-v has 2 a rank"]),
    ],
)
def test_bad_sizes_are_all_named(wrong, faults):
    with pytest.raises(ValueError) as error:
        wrong()
    for fault in faults:
        assert fault in str(error.value)


def test_build_knows_every_name():
    direct = {
        "gpipe": gpipe(4, 8),
        "1f1b": one_f_one_b(4, 8),
        "interleaved": interleaved(4, 8, 2),
        "forward-only": forward_only(4, 8),
        "zb-h1": zero_bubble_h1(4, 8),
        "zb-h2": zero_bubble_h2(4, 8),
        "zb-v": zero_bubble_v(4, 8),
        "dualpipe-v": dualpipe_v(4, 8),
        "pipedream": pipedream(4, 8),
        "pipedream-2bw": pipedream_2bw(4, 8),
    }
    assert tuple(direct) == NAMES
    for name, schedule in direct.items():
        assert build(name, 4, 8) == schedule
        assert schedule.name == name
    assert build("interleaved", 4, 8, 3, 5) == interleaved(4, 8, 3, 5)
    assert build("forward-only", 4, 8, 2) == forward_only(4, 8, 2)
    assert build("zb-v", 4, 8, 1) == build("zb-v", 4, 8, 2)  # a training program says 1 where nobody chose
