"""From actions to messages: who posts what when, and that it runs whatever the times."""

import random
from itertools import product

import pytest

from minimeg.schedule import (
    Action,
    Free,
    Recv,
    Run,
    Send,
    forward_only,
    interleaved,
    one_f_one_b,
    plan,
    prove,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

from .rendezvous import execute
from .test_orders import every_order


def sample(seed, count, largest_p=8, largest_m=24):
    """``count`` schedules of random sizes, the same at every run."""
    rng = random.Random(seed)
    for _ in range(count):
        p, m = rng.randint(1, largest_p), rng.randint(1, largest_m)
        yield rng.choice(list(every_order(p, m, chunks=(rng.randint(1, 4),), groups=(0, rng.randint(1, p + 2)))))


def positions(row, kind):
    return {step.transfer: i for i, step in enumerate(row) if isinstance(step, kind)}


@pytest.mark.parametrize("seed", range(4))
def test_every_message_is_posted_once_at_each_end_around_its_actions(seed):
    for schedule in sample(seed, 40):
        sent, received = {}, {}
        for rank, row in enumerate(plan(schedule)):
            runs = {step.action: i for i, step in enumerate(row) if isinstance(step, Run)}
            assert tuple(runs) == schedule.ranks[rank]
            sends, recvs, frees = (positions(row, kind) for kind in (Send, Recv, Free))
            assert len(row) == len(runs) + len(sends) + len(recvs) + len(frees)  # none twice
            for transfer, i in recvs.items():
                assert transfer.destination == rank != transfer.source
                assert i < runs[transfer.consumer]
            for transfer, i in sends.items():
                assert transfer.source == rank
                assert runs[transfer.producer] < i < frees[transfer]
            assert sends.keys() == frees.keys()
            tags = [step.transfer.tag for step in row if isinstance(step, Recv | Send)]
            assert tags == sorted(tags)  # the one global order
            sent |= sends
            received |= recvs
        assert sent.keys() == received.keys()
        assert sorted(transfer.tag for transfer in sent) == list(range(len(sent)))
        assert len(sent) == prove(schedule).messages


@pytest.mark.parametrize("seed", range(2))
def test_every_action_gets_what_its_neighbour_made(seed):
    for schedule in sample(100 + seed, 40):
        for rank, row in enumerate(plan(schedule)):
            by_consumer = {step.transfer.consumer: step.transfer for step in row if isinstance(step, Recv)}
            for action in schedule.ranks[rank]:
                stage = schedule.virtual_stage(rank, action.chunk)
                neighbour = {"F": stage - 1, "B": stage + 1, "W": -1}[action.kind]
                if not 0 <= neighbour < schedule.stages * schedule.chunks:
                    assert action not in by_consumer
                    continue
                source = schedule.rank_of(neighbour)
                if source == rank:
                    assert action not in by_consumer  # handed over in memory
                    continue
                transfer = by_consumer[action]
                assert (transfer.source, transfer.destination) == (source, rank)
                assert transfer.producer == Action(action.kind, action.microbatch, schedule.chunk_of(neighbour))
                assert transfer.kind == {"F": "activation", "B": "gradient"}[action.kind]


@pytest.mark.parametrize(
    ("serial", "duplex"),
    [(False, False), (True, False), (False, True)],
    ids=["pairs-in-order", "ranks-in-order", "directions-in-order"],
)
@pytest.mark.parametrize("seed", range(6))
def test_no_deadlock_and_no_free_that_blocks(seed, serial, duplex):
    """Sends wait for receives, there are no tags, and ranks and actions differ in speed by a thousand."""
    for i, schedule in enumerate(sample(200 + seed, 40)):
        outcome = execute(plan(schedule, duplex), seed=1000 * seed + i, serial=serial)
        assert not outcome.deadlock
        assert not outcome.crossed
        assert tuple(map(tuple, outcome.log)) == schedule.ranks
        assert outcome.unfreed == 0
        if not schedule.forward_only:  # where nothing comes back a Free has to wait for the receiver
            assert not outcome.blocking_frees


def most_sends(schedule):
    return max(execute(plan(schedule), seed=0).peak_sends)


def test_outstanding_sends_stay_bounded():
    for p, m in product(range(2, 9), (1, 2, 3, 5, 8, 13, 20, 32)):
        assert most_sends(one_f_one_b(p, m)) <= p
        assert most_sends(zero_bubble_h1(p, m)) <= p
        assert most_sends(zero_bubble_h2(p, m)) <= 2 * p
        assert most_sends(interleaved(p, m, 2)) <= 2 * p
        assert most_sends(zero_bubble_v(p, m)) <= 2 * p
        assert most_sends(forward_only(p, m)) <= 3  # two sends later


def test_receives_are_not_posted_long_before_they_are_used():
    """As many buffers as ranks, not as micro-batches."""
    for p, m in product(range(2, 9), (4, 16, 32)):
        for schedule in (one_f_one_b(p, m), zero_bubble_h1(p, m), interleaved(p, m, 2), zero_bubble_v(p, m)):
            for row in plan(schedule):
                needed = {step.transfer.consumer for step in row if isinstance(step, Recv)}
                waiting = most = 0
                for step in row:
                    if isinstance(step, Recv):
                        waiting += 1
                        most = max(most, waiting)
                    elif isinstance(step, Run) and step.action in needed:
                        waiting -= 1
                assert most <= p + 1


def test_where_messages_pass_each_other_every_receive_stands_two_actions_ahead():
    """And no later because of another receive. On a transport that keeps one order half of them would stand directly before use."""
    late = 0
    for schedule in (one_f_one_b(4, 8), zero_bubble_h1(4, 8), interleaved(4, 8, 2)):
        for ordered, duplex in zip(plan(schedule), plan(schedule, duplex=True), strict=True):
            for row in (ordered, duplex):
                runs = [step.action for step in row if isinstance(step, Run)]
                at = {
                    step.transfer: sum(isinstance(s, Run) for s in row[:i])
                    for i, step in enumerate(row)
                    if isinstance(step, Recv)
                }
                ahead = [runs.index(transfer.consumer) - slot for transfer, slot in at.items()]
                if row is duplex:
                    assert all(gap >= min(2, runs.index(t.consumer)) for gap, t in zip(ahead, at, strict=True))
                else:
                    late += ahead.count(0)
    assert late > 50


def test_a_forward_only_schedule_keeps_the_one_order_on_every_transport():
    """Its Frees wait for the receiver; that they end is shown for that order only."""
    for chunks, placement in ((1, "loop"), (2, "loop"), (2, "v")):
        schedule = forward_only(4, 9, chunks, placement)
        assert plan(schedule, duplex=True) == plan(schedule)


def test_a_duplex_plan_hangs_where_all_messages_keep_one_order():
    """Which is why NCCL gets the other one."""
    assert execute(plan(one_f_one_b(2, 3), duplex=True), seed=0, serial=True).deadlock
    assert not execute(plan(one_f_one_b(2, 3)), seed=0, serial=True).deadlock


def text(step):
    match step:
        case Run(action):
            return str(action)
        case Send(t) | Recv(t) | Free(t):
            return f"{type(step).__name__.lower()} {t.producer}"


def test_a_plan_in_full():
    first, second = ([text(step) for step in row] for row in plan(one_f_one_b(2, 3)))
    assert first == [
        "F0.0", "send F0.0", "F0.1", "send F0.1", "recv B0.0", "B0.0", "free F0.0", "F0.2", "send F0.2", "recv B0.1", "recv B0.2",
        "B0.1", "free F0.1", "B0.2", "free F0.2",
    ]  # fmt: skip
    assert second == [
        "recv F0.0", "recv F0.1", "F0.0", "B0.0", "send B0.0", "recv F0.2", "F0.1", "B0.1", "send B0.1", "F0.2", "free B0.0",
        "B0.2", "send B0.2", "free B0.1", "free B0.2",
    ]  # fmt: skip


def test_neighbours_on_one_rank_send_nothing():
    for schedule in (interleaved(1, 3, 3), zero_bubble_v(1, 4)):
        assert all(isinstance(step, Run) for step in plan(schedule)[0])
    turn = {step.transfer.consumer for step in plan(zero_bubble_v(3, 6))[2] if isinstance(step, Recv)}
    assert not {(action.kind, action.chunk) for action in turn} & {("F", 1), ("B", 0)}


def test_two_ranks_are_each_others_next_and_previous():
    """With p=2 activations and gradients of both chunks travel between the same two ranks; only the order tells them apart."""
    for m in range(1, 9):
        schedule = interleaved(2, m, 2)
        steps = plan(schedule)
        for seed, serial in product(range(5), (False, True)):
            outcome = execute(steps, seed, serial)
            assert not outcome.crossed
            assert not outcome.deadlock
