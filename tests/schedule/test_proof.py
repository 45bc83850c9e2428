"""``prove`` accepts what can run and says what is wrong with the rest."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minimeg.schedule import (
    NAMES,
    Action,
    Schedule,
    ScheduleError,
    build,
    interleaved,
    one_f_one_b,
    plan,
    prove,
    simulate,
    zero_bubble_v,
)
from minimeg.schedule.posting import Messages, Posts
from minimeg.schedule.proof import post_faults

from .rendezvous import execute

# ---- random mutations against an independent checker --------------------------------------------------------------------------


def runs(schedule):
    """Slow and simple: is every action there once, and does trying every rank's next action over and over get through?

    Written from the definition of a schedule, with none of the package's tables.
    """
    p, n, v = schedule.stages, schedule.chunks, schedule.placement == "v"
    home = {}
    for rank in range(p):
        for chunk in range(n):
            home[2 * p - 1 - rank if v and chunk else chunk * p + rank] = (rank, chunk)
    seen = {action.kind for row in schedule.ranks for action in row}
    kinds = "FBW" if "W" in seen else "FB" if "B" in seen else "F"
    for row in schedule.ranks:
        wanted = Counter((k, m, c) for k in kinds for m in range(schedule.microbatches) for c in range(n))
        if Counter(map(tuple, row)) != wanted:
            return False
    done, at, moved = set(), [0] * p, True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while at[rank] < len(row):
                kind, m, c = row[at[rank]]
                stage = next(s for s, place in home.items() if place == (rank, c))
                needs = {
                    "F": [("F", m, stage - 1)],
                    "B": [("F", m, stage), ("B", m, stage + 1)],
                    "W": [("B", m, stage)],
                }[kind]
                if any(need not in done for need in needs if need[2] in home):
                    break
                done.add((kind, m, stage))
                at[rank] += 1
                moved = True
    return at == [len(row) for row in schedule.ranks]


@st.composite
def mutated(draw):
    """A good schedule with one to three actions swapped, moved, dropped or doubled."""
    name, p, m = draw(st.sampled_from(NAMES)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    schedule = build(name, p, max(m, p) if name == "pipedream-2bw" else m)
    rows = [list(row) for row in schedule.ranks]
    for _ in range(draw(st.integers(1, 3))):
        how = draw(st.sampled_from(["swap", "neighbours", "move", "elsewhere", "drop", "double", "rename"]))
        row = rows[draw(st.integers(0, p - 1))]
        if not row:
            continue
        i, j = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        if how == "swap":
            row[i], row[j] = row[j], row[i]
        elif how == "neighbours":
            row[i - 1], row[i] = row[i], row[i - 1]
        elif how == "move":
            row.insert(j, row.pop(i))
        elif how == "elsewhere":
            other = rows[draw(st.integers(0, p - 1))]
            other.insert(min(j, len(other)), row.pop(i))
        elif how == "drop":
            row.pop(i)
        elif how == "double":
            row.insert(j, row[i])
        else:
            row[i] = Action(draw(st.sampled_from("FBW")), draw(st.integers(-1, m)), draw(st.integers(-1, 2)))
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def test_500_mutations_are_refused_or_run():
    verdicts = Counter()

    @settings(max_examples=500, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mutated())
    def try_one(schedule):
        good = runs(schedule)
        verdicts[good] += 1
        if not good:
            for function in (prove, plan, simulate):
                with pytest.raises(ScheduleError, match=r"cannot run"):
                    function(schedule)
            return
        prove(schedule)
        for serial in (False, True):
            outcome = execute(plan(schedule), seed=verdicts[good], serial=serial)
            assert not outcome.deadlock
            assert not outcome.crossed
            assert tuple(map(tuple, outcome.log)) == schedule.ranks

    try_one()
    assert sum(verdicts.values()) >= 500
    assert min(verdicts.values()) > 100  # both kinds were tried


# ---- what it says ---------------------------------------------------------------------------------------------------------------


def refusal(schedule):
    with pytest.raises(ScheduleError) as error:
        prove(schedule)
    return str(error.value)


def changed(schedule, rank, old, new):
    row = " ".join(map(str, schedule.ranks[rank])).replace(old, new)
    rows = list(schedule.ranks)
    rows[rank] = tuple(map(Action.parse, row.split()))
    return replace(schedule, ranks=tuple(rows))


def test_missing_doubled_and_misplaced_actions_are_all_named():
    wrong = changed(one_f_one_b(3, 3), 0, "F0.2", "F0.1")
    wrong = changed(wrong, 2, "F0.1", "F1.5")
    message = refusal(wrong)
    assert "rank 0: F0.1 occurs more than once" in message
    assert "rank 0: F0.2 is missing" in message
    assert "rank 2: F1.5 does not belong here" in message
    assert "rank 2: F0.1 is missing" in message
    assert "rank 1" not in message


def test_a_long_list_of_faults_is_cut():
    schedule = one_f_one_b(2, 40)
    message = refusal(replace(schedule, ranks=(schedule.ranks[0], schedule.ranks[0][:1])))
    assert len(message.splitlines()) < 15
    assert "and 69 more" in message


def test_a_b_before_its_f_and_a_w_before_its_b():
    message = refusal(Schedule.parse("F0 F1 B0 B1\nB0 F0 F1 B1"))
    assert "rank 1 waits for itself: B0.0 needs F0.0, which comes after it; put F0.0 first" in message
    message = refusal(Schedule.parse("F0 W0 B0"))
    assert "rank 0 waits for itself: W0.0 needs B0.0" in message


def test_a_w_for_one_b_only():
    assert "rank 0: W0.1 is missing" in refusal(Schedule.parse("F0 F1 B0 W0 B1"))


def test_the_circle_is_spelled_out_with_a_repair_that_works():
    message = refusal(Schedule.parse("F0 B0 F1 B1\nF0 F1 B0 B1"))
    assert message.splitlines() == [
        "custom cannot run; ranks wait for each other in a circle:",
        "  rank 0 waits, before B0.0, for the gradient of micro-batch 0 from B0.0 of rank 1, which rank 1 does only after its F0.1",
        "  rank 1 waits, before F0.1, for the activation of micro-batch 1 from F0.1 of rank 0, which rank 0 does only after its B0.0",
        "It runs with B0.0 put before F0.1 on rank 1.",
    ]
    prove(Schedule.parse("F0 B0 F1 B1\nF0 B0 F1 B1"))


def test_a_rank_that_waits_for_itself_across_its_chunks():
    """At the turn of a "v" the neighbour is the rank itself."""
    message = refusal(changed(zero_bubble_v(1, 1), 0, "F0.0 F1.0", "F1.0 F0.0"))
    assert "a rank waits for itself" in message
    assert "from its own F0.0, which comes later in its list" in message
    assert "It runs with F0.0 put before F1.0 on rank 0." in message


def test_the_plain_order_of_incomplete_groups_is_found_out():
    """p=5 m=7 n=2: what Megatron-LM's order would be if it did not refuse."""
    p, m, n = 5, 7, 2
    table = [(k, c) for first in range(0, m, p) for c in range(n) for k in range(first, min(first + p, m))]
    rows = []
    for rank in range(p):
        forwards = [Action("F", k, c) for k, c in table]
        backwards = [Action("B", k, n - 1 - c) for k, c in table]
        warmup = min(2 * (p - rank - 1) + (n - 1) * p, m * n)
        steady = [a for pair in zip(forwards[warmup:], backwards, strict=False) for a in pair]
        rows.append((*forwards[:warmup], *steady, *backwards[m * n - warmup :]))
    message = refusal(Schedule("plain", p, m, n, tuple(rows)))
    assert "ranks wait for each other in a circle" in message
    prove(interleaved(p, m, n))


def test_no_repair_is_offered_where_one_move_is_not_enough():
    schedule = Schedule.parse("F0 B0 F1 B1 F2 B2\nF0 F1 F2 B2 B1 B0")
    message = refusal(schedule)
    assert "circle" in message
    assert "It runs with" not in message


def test_a_stuck_rank_may_be_at_the_very_action_that_is_wanted():
    """Rank 1 waits for rank 0, and rank 0 for the F0.0 that rank 1 is about to do."""
    message = refusal(changed(interleaved(2, 2, 2), 0, "F0.0 F0.1 F1.0", "F1.0 F0.1 F0.0"))
    assert "from F0.0 of rank 1, which rank 1 cannot do yet" in message
    assert "It runs with F0.0 put before F1.0 on rank 0." in message


def test_backwards_in_another_order_are_legal():
    """B of rank 2 in the order 1, 0: right gradients, 39 slots instead of 33."""
    swapped = changed(one_f_one_b(4, 8), 2, "B0.0 F0.2 B0.1", "B0.1 F0.2 B0.0")
    prove(swapped)
    assert simulate(swapped).makespan == 39


# ---- the messages ---------------------------------------------------------------------------------------------------------------


def test_posts_out_of_order_are_found_out():
    """Every breach of the two conditions under which the posts are proven."""
    schedule = one_f_one_b(3, 4)
    assert post_faults(Messages(schedule)) == []

    def faults(rank, change):
        messages = Messages(schedule)
        transfers, slots = (list(part) for part in messages.posts[rank])
        change(transfers, slots)
        messages.posts[rank] = Posts(transfers, slots)
        return "; ".join(post_faults(messages))

    def swap(transfers, slots):
        transfers[2], transfers[3] = transfers[3], transfers[2]

    def too_early(transfers, slots):
        slots[0] = 0  # the first post of rank 0 is the send of F0.0

    def too_late(transfers, slots):
        slots[:] = [slot + 3 for slot in slots]

    def twice(transfers, slots):
        transfers.insert(1, transfers[0])
        slots.insert(1, slots[0])

    def never(transfers, slots):
        del transfers[0], slots[0]

    assert "rank 1 does not post transfer" in faults(1, swap)
    assert "rank 0 sends transfer 0 before it is made" in faults(0, too_early)
    assert "rank 2 asks for transfer" in faults(2, too_late)
    assert "transfer 0 is posted 2 times by its sender" in faults(0, twice)
    assert "is posted 0 times by its receiver" in faults(2, never)


def test_a_plan_in_another_order_deadlocks_or_crosses():
    """The model of the ranks is no rubber stamp: without the global order it gets stuck or delivers the wrong message."""
    crossed = stuck = 0
    for schedule in (one_f_one_b(4, 8), interleaved(2, 8, 2), zero_bubble_v(3, 6)):
        steps = [list(row) for row in plan(schedule)]
        for rank, row in enumerate(steps):
            recvs = [i for i, step in enumerate(row) if type(step).__name__ == "Recv"]
            for i, j in itertools.pairwise(recvs):
                worse = [list(r) for r in steps]
                worse[rank][i], worse[rank][j] = row[j], row[i]
                crossed += bool(execute(worse, seed=1).crossed)
                stuck += bool(execute(worse, seed=1, serial=True).deadlock)
    assert crossed > 10
    assert stuck > 10
