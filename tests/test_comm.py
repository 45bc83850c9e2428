"""Group: right on every memory layout and dtype, the caller's tensor untouched, mistakes explained; the ledger against a counter."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minimeg.comm import CommunicationError, Group, ledger, phase
from minimeg.lab.ranks import RankError
from minimeg.ledger import RECORDER, FlightRecorder, wire_bytes
from minimeg.parallel_state import initialize_model_parallel, single_process
from tests.rank_functions import Outside, strided, tensor_group

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
SIZES = (1, 2, 3, 4)


def on_ranks(ranks: Any, t: int, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
    """One rank is this process."""
    return [function(*args)] if t == 1 else ranks(t, function, *args, **more)


# ---- every operation on every layout -----------------------------------------------------------------------------------------


def value(rank: int, t: int, dtype: torch.dtype) -> Tensor:
    """[t, 2, t] with other values in every element and on every rank, and sums that are exact in this dtype, but in no narrower."""
    x = torch.arange(2 * t * t, dtype=dtype).view(t, 2, t) + 2 * t * t * rank
    if dtype == torch.int64:
        return x + 2**54  # not exact in float64
    return x * (1 + 2**-40) if dtype == torch.float64 else x


def operations(g: Group) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[list[Tensor]], Tensor]]]:
    """name -> (the operation, what it should give from the tensors of all ranks)."""
    t, r = g.size, g.rank
    found: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[list[Tensor]], Tensor]]] = {
        "all_reduce": (g.all_reduce, sum),
        "all_reduce max": (lambda x: g.all_reduce(x, "max"), lambda xs: torch.stack(xs).amax(0)),
        "all_reduce min": (lambda x: g.all_reduce(x, op="min"), lambda xs: torch.stack(xs).amin(0)),
        "all_reduce_async": (lambda x: g.all_reduce_async(x).wait(), sum),
    }
    for dim in (0, 1, -1):
        found[f"all_gather {dim}"] = (lambda x, d=dim: g.all_gather(x, d), lambda xs, d=dim: torch.cat(xs, d))
    for dim in (0, -1):
        found[f"reduce_scatter {dim}"] = (
            lambda x, d=dim: g.reduce_scatter(x, d),
            lambda xs, d=dim: sum(xs).chunk(t, d)[r],
        )
    found["reduce_scatter_async"] = (lambda x: g.reduce_scatter_async(x).wait(), lambda xs: sum(xs).chunk(t)[r])
    for a, b in ((0, 2), (2, 0), (0, 0), (0, 1), (-1, 1)):
        found[f"all_to_all {a} {b}"] = (
            lambda x, a=a, b=b: g.all_to_all(x, a, b),
            lambda xs, a=a, b=b: torch.cat([x.chunk(t, a)[r] for x in xs], b),
        )
    for src in range(t):
        found[f"broadcast {src}"] = (lambda x, s=src: g.broadcast(x, s), lambda xs, s=src: xs[s])
    if t > 1:
        found["ring"] = (lambda x: ring(g, x), lambda xs: xs[r - 1])
    return found


def ring(g: Group, x: Tensor) -> Tensor:
    """Send to the next, receive from the one before; also what the send returns is right."""
    sending = g.isend(x, (g.rank + 1) % g.size, tag=7)
    received = g.irecv(x.shape, x.dtype, (g.rank - 1) % g.size, tag=7).wait()
    assert torch.equal(sending.wait(), x)
    return received


def check_operations(t: int) -> int:
    """-> how many calls were compared."""
    g, compared = tensor_group(t), 0
    for dtype in DTYPES:
        whole = [value(rank, t, dtype) for rank in range(t)]
        layouts = [(kind, x, storage, whole) for kind, x, storage in strided(whole[g.rank])]
        for dim in (0, 1, 2):
            thin = [x.narrow(dim, 0, 1) for x in whole]
            mine = thin[g.rank].clone()
            layouts.append((f"expanded {dim}", mine.expand(t, 2, t), mine, [x.expand(t, 2, t) for x in thin]))
        for kind, x, storage, everyones in layouts:
            assert torch.equal(x, everyones[g.rank])
            for name, (operation, right) in operations(g).items():
                before = storage.clone()
                got, expected = operation(x), right(everyones)
                where = f"{name} of a {kind} {dtype} at t={t}, rank {g.rank}"
                assert got.dtype == dtype, f"{where}: dtype {got.dtype}"
                assert got.shape == expected.shape, f"{where}: shape {got.shape}"
                assert torch.equal(got, expected), f"{where}:\n{got}\ninstead of\n{expected}"
                assert torch.equal(storage, before), f"{where}: the caller's memory changed"
                got.fill_(-1)  # a new tensor: writing to it does not reach the caller's
                assert torch.equal(storage, before), f"{where}: the result shares memory with the argument"
                compared += 1
    return compared


@pytest.mark.parametrize("t", SIZES)
def test_operations_on_every_layout_and_dtype(ranks: Any, t: int) -> None:
    """CASE 05: gloo's collectives are silently wrong on strided views. Distinct values in every element and on every rank."""
    counts = on_ranks(ranks, t, check_operations, t)
    assert counts == [len(DTYPES) * 8 * (15 + t + (t > 1))] * t


def check_scalars_and_nothing(t: int) -> None:
    g = tensor_group(t)
    for dtype in DTYPES:
        x = torch.tensor(g.rank + 1, dtype=dtype)
        assert torch.equal(g.all_reduce(x), torch.tensor(t * (t + 1) // 2, dtype=dtype))
        assert torch.equal(g.all_gather(x), torch.arange(1, t + 1, dtype=dtype)), "one number a rank, also for one rank"
        assert torch.equal(g.broadcast(x, t - 1), torch.tensor(t, dtype=dtype))
        if t > 1:
            assert torch.equal(ring(g, x), torch.tensor((g.rank - 1) % t + 1, dtype=dtype))
        for shape in ((0,), (t, 0), (0, t)):
            empty = torch.empty(shape, dtype=dtype)
            assert g.all_reduce(empty).shape == shape
            assert g.broadcast(empty, 0).shape == shape
            for dim in range(len(shape)):
                whole = torch.Size(n * t if d == dim else n for d, n in enumerate(shape))
                assert g.all_gather(empty, dim).shape == whole
                assert g.reduce_scatter(whole_empty := empty.new_empty(whole), dim).shape == shape
                assert g.all_to_all(whole_empty, dim, 0).dtype == dtype
            if t > 1:
                assert ring(g, empty).shape == shape
        with pytest.raises(ValueError, match=r"dimension 0 of shape \[\] must be a multiple"):
            g.reduce_scatter(x)
        with pytest.raises(ValueError, match=r"all_to_all .* of shape \[\]"):
            g.all_to_all(x, 0, 0)
        assert int(x) == g.rank + 1


@pytest.mark.parametrize("t", SIZES)
def test_scalars_and_empty_tensors(ranks: Any, t: int) -> None:
    on_ranks(ranks, t, check_scalars_and_nothing, t)


def gather_json(t: int) -> list[Any]:
    g = tensor_group(t)
    value: Any = {"rank": g.rank, "text": "ä" * g.rank, "pair": (g.rank, [None, 1.5])}
    gathered = g.all_gather_json(value)
    gathered[g.rank]["pair"].append("mine")  # what comes back is nobody's argument
    assert value["pair"] == (g.rank, [None, 1.5])
    return g.all_gather_json({7: g.rank}) + gathered


@pytest.mark.parametrize("t", SIZES)
def test_all_gather_json_gives_the_same_at_every_size(ranks: Any, t: int) -> None:
    for rank, result in enumerate(on_ranks(ranks, t, gather_json, t)):
        assert result == [{"7": r} for r in range(t)] + [
            {"rank": r, "text": "ä" * r, "pair": [r, [None, 1.5]] + ["mine"] * (r == rank)} for r in range(t)
        ]


def positions_are_not_ranks() -> list[Any]:
    """Groups [0, 2], [1, 3] (pp) and [0, 1], [2, 3] (tp): a position is another number than the rank."""
    state = initialize_model_parallel(2, 2)
    mine = torch.tensor([10.0 * state.rank])
    result: list[Any] = []
    for group in (state.tp, state.pp):
        result.append([group.broadcast(mine, src).item() for src in (0, 1)])
        result.append(ring(group, mine).item())
        result.append(group.all_gather(mine).tolist())
        result.append(group.all_to_all(mine + torch.arange(2), 0, 0).tolist())
    return result


def test_positions_inside_a_group_become_global_ranks(ranks: Any) -> None:
    """Megatron-LM issue 620: 0 -> 2 works by luck where 1 -> 3 hangs."""
    partners = {0: (0, 1, 0, 2), 1: (0, 1, 1, 3), 2: (2, 3, 0, 2), 3: (2, 3, 1, 3)}
    for rank, result in enumerate(ranks(4, positions_are_not_ranks)):
        for group, (a, b) in enumerate((partners[rank][:2], partners[rank][2:])):
            both, other = [10.0 * a, 10.0 * b], b if rank == a else a
            assert result[4 * group : 4 * group + 3] == [both, 10.0 * other, both]
            assert result[4 * group + 3] == [x + (rank == b) for x in both]


# ---- messages ----------------------------------------------------------------------------------------------------------------


def both_ways_with_equal_tags() -> list[Any]:
    """p = 2: the next rank and the one before are the same peer. Several messages of equal shape and tag keep their order."""
    g = initialize_model_parallel(1, 2).pp
    other = 1 - g.rank
    sending = [g.isend(torch.full((2, 3), 10.0 * g.rank + i), other, tag=5) for i in range(4)]
    coming = [g.irecv((2, 3), torch.float32, other, tag=5) for _ in range(4)]
    received = [pending.wait() for pending in coming]
    for pending in sending:
        pending.wait()
    assert all(bool((x == x[0, 0]).all()) for x in received)
    assert torch.equal(coming[0].wait(), received[0]), "a second wait returns the tensor again"
    return [x[0, 0].item() for x in received]


def test_two_ranks_send_both_ways_with_equal_tags(ranks: Any) -> None:
    assert ranks(2, both_ways_with_equal_tags) == [[10, 11, 12, 13], [0, 1, 2, 3]]


def wait_in_another_order() -> list[list[float]] | None:
    """Receives of different shapes under one tag, posted in order, but waited for in the reverse order."""
    g = initialize_model_parallel(1, 2).pp
    if g.rank == 0:
        for pending in [g.isend(torch.full((n,), float(n)), 1) for n in (1, 2, 3)]:
            pending.wait()
        return None
    coming = [g.irecv((n,), torch.float32, 0) for n in (1, 2, 3)]
    return [coming[i].wait().tolist() for i in (2, 0, 1)]


def test_receives_may_be_waited_for_in_any_order(ranks: Any) -> None:
    assert ranks(2, wait_in_another_order) == [None, [[3, 3, 3], [1], [2, 2]]]


KEPT: dict[str, Group] = {}  # on a rank: what stays between calls


def leave_a_receive_behind() -> None:
    """An error while receives are posted; the pool then forms the same group again, over a new store."""
    g = KEPT["pp"] = initialize_model_parallel(1, 2).pp
    if g.rank == 0:
        g.isend(torch.ones(1), 1).wait()
    else:
        pending = [g.irecv((1,), torch.float32, 0) for _ in range(3)]
        raise RuntimeError(f"{len(pending)} receives are posted")


def use_the_group_again() -> float | None:
    g = KEPT["pp"]
    if g.rank == 0:
        g.isend(torch.full((2,), 6.0), 1).wait()
        return None
    return g.irecv((2,), torch.float32, 0).wait().sum().item()


def test_receives_left_behind_by_an_error_do_not_disturb_later_ones(ranks: Any) -> None:
    with pytest.raises(RankError, match="3 receives are posted"):
        ranks(2, leave_a_receive_behind)
    assert ranks(2, use_the_group_again, timeout=20) == [None, 12]


def unequal(sent: tuple[tuple[int, ...], torch.dtype], expected: tuple[tuple[int, ...], torch.dtype]) -> None:
    g = initialize_model_parallel(1, 2).pp
    if g.rank == 0:
        g.isend(torch.ones(sent[0], dtype=sent[1]), 1, tag=3).wait()
    else:
        g.irecv(*expected, 0, tag=3).wait()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (((4,), torch.float32), ((8,), torch.float32)),  # gloo: half of it garbage
        (((8,), torch.float32), ((4,), torch.float32)),  # gloo: aborts the process
        (((4,), torch.float32), ((4,), torch.float64)),
        (((4,), torch.float64), ((8,), torch.float32)),  # as many bytes
        (((2, 3), torch.float32), ((3, 2), torch.float32)),
        (((4,), torch.bfloat16), ((4,), torch.float16)),
        (((0,), torch.float32), ((1,), torch.float32)),
        (((), torch.float32), ((1,), torch.float32)),
    ],
)
def test_a_receive_of_something_else_names_both(ranks: Any, sent: Any, expected: Any) -> None:
    began = time.perf_counter()
    with pytest.raises(RankError) as caught:
        ranks(2, unequal, sent, expected)
    assert time.perf_counter() - began < 10  # not the 60 s after which a wait gives up
    assert "rank 1" in str(caught.value)
    for shape, dtype in (sent, expected):
        assert f"{str(dtype).removeprefix('torch.')}{list(shape)}" in str(caught.value)
    assert "tag 3" in str(caught.value)


def unequal_but_caught(sent: int, expected: int) -> tuple[str, float]:
    """Rank 1 keeps going after its error, so that rank 0 has to give up by itself."""
    g = initialize_model_parallel(1, 2, timeout_seconds=1).pp
    began = time.perf_counter()
    pending = g.isend(torch.ones(sent), 1, tag=3) if g.rank == 0 else g.irecv((expected,), torch.float32, 0, tag=3)
    with pytest.raises(CommunicationError) as caught:
        pending.wait()
    seconds = time.perf_counter() - began
    dist.barrier()  # of the world: rank 0 has failed, too
    return str(caught.value), seconds


def test_the_sender_of_something_else_gives_up_and_says_what_it_sent(ranks: Any) -> None:
    (sender, waited), (receiver, at_once) = ranks(2, unequal_but_caught, 4, 8)
    ranks.pool(2).reset()
    assert "rank 1 (pp=1): recv float32[8] from 0 tag 3 over pp [0, 1] failed" in receiver
    assert "position 0 of pp sent float32[4], but float32[8] was expected" in receiver
    assert at_once < 0.9
    assert "rank 0 (pp=0): send float32[4] to 1 tag 3 over pp [0, 1] failed" in sender
    assert 0.9 < waited < 10


def agree(sent: list[str], expected: list[str]) -> None:
    g = initialize_model_parallel(1, 2).pp
    with g.agreed({1: sent}, {}) if g.rank == 0 else g.agreed({}, {0: expected}):
        pass


@pytest.mark.parametrize(
    ("sent", "expected", "fault"),
    [
        (["a", "a", "b"], ["a", "b", "b"], "will send a as message 1 of 3, but b was expected"),
        (["a", "a"], ["a"], "will send a as message 1 of 2, but nothing was expected"),
        (["a"], ["a", "a"], "will send nothing as message 1 of 1, but a was expected"),
    ],
)
def test_many_messages_are_compared_at_once(ranks: Any, sent: list[str], expected: list[str], fault: str) -> None:
    ranks(2, agree, 3 * sent, 3 * sent)
    with pytest.raises(RankError, match=f"position 0 of pp {fault}"):
        ranks(2, agree, sent, expected)


def unequal_after_an_agreement() -> None:
    g = initialize_model_parallel(1, 2).pp
    nothing: dict[int, list[str]] = {}
    with g.agreed(nothing, nothing):
        pass
    if g.rank == 0:
        g.isend(torch.ones(4), 1).wait()
    else:
        g.irecv((8,), torch.float32, 0).wait()


def test_after_an_agreement_messages_are_compared_one_by_one_again(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"position 0 of pp sent float32\[4\], but float32\[8\] was expected"):
        ranks(2, unequal_after_an_agreement)


# ---- mistakes of the caller ---------------------------------------------------------------------------------------------------


def check_refusals(t: int) -> None:
    """Refused before anything is sent: nobody waits, and the next operation works."""
    g, x = tensor_group(t), torch.ones(t, t)
    grown = torch.ones(t, t, requires_grad=True) * 2
    with ledger() as book:
        for op in ("mean", "SUM", "", None):
            with pytest.raises(ValueError, match=r"op must be one of 'sum', 'max', 'min', got"):
                g.all_reduce(x, op)  # type: ignore[arg-type]
        for src in (-1, t):
            with pytest.raises(ValueError, match=rf"src is a position in the group .* of {t} ranks, got {src}"):
                g.broadcast(x, src)
            with pytest.raises(ValueError, match=rf"dst is a position .* got {src}"):
                g.isend(x, src)
            with pytest.raises(ValueError, match=rf"src is a position .* got {src}"):
                g.irecv((1,), torch.float32, src)
        with pytest.raises(ValueError, match=f"dst={g.rank} is this rank itself"):
            g.isend(x, g.rank)
        with pytest.raises(ValueError, match=f"src={g.rank} is this rank itself"):
            g.irecv((1,), torch.float32, g.rank)
        if t > 1:
            other = (g.rank + 1) % t
            for tag in (-1, 2**21):
                with pytest.raises(ValueError, match=rf"tag must lie in 0..{2**21 - 1}, got {tag}"):
                    g.isend(x, other, tag)
                with pytest.raises(ValueError, match=rf"tag must lie in 0..{2**21 - 1}, got {tag}"):
                    g.irecv((1,), torch.float32, other, tag)
            odd = torch.ones(t + 1, t)
            with pytest.raises(
                ValueError, match=rf"dimension 0 of shape \[{t + 1}, {t}\] must be a multiple .* {t} ranks"
            ):
                g.reduce_scatter(odd)
            with pytest.raises(ValueError, match=rf"dimension -2 of shape \[{t + 1}, {t}\]"):
                g.all_to_all(odd, -2, 0)
        for refuses in (
            g.all_reduce,
            g.all_reduce_async,
            g.all_gather,
            g.reduce_scatter,
            lambda y: g.all_to_all(y, 0, 1),
            lambda y: g.broadcast(y, 0),
            *([lambda y: g.isend(y, (g.rank + 1) % t)] if t > 1 else []),
        ):
            with pytest.raises(ValueError, match=r"does not differentiate.*MulBackward0.*minimeg\.mappings"):
                refuses(grown)
    assert book.records == [], "what was refused was never sent, so it is not counted"
    with torch.no_grad():  # no gradient is wanted, so none can be lost
        assert torch.equal(g.all_reduce(grown), torch.full((t, t), 2.0 * t))
    leaf = torch.ones(t, t, requires_grad=True)  # a parameter, say
    assert not g.reduce_scatter(leaf).requires_grad
    assert not g.all_gather(leaf).requires_grad
    assert g.all_gather(torch.tensor(1.0, requires_grad=True)).shape == (t,)
    highest = 2**21 - 1
    if t > 1:
        received = g.irecv((1,), torch.float32, (g.rank - 1) % t, highest)
        g.isend(torch.ones(1), (g.rank + 1) % t, highest).wait()
        assert received.wait().item() == 1


@pytest.mark.parametrize("t", SIZES)
def test_refusals(ranks: Any, t: int) -> None:
    on_ranks(ranks, t, check_refusals, t)


# ---- failures explain themselves ---------------------------------------------------------------------------------------------


def never_answered() -> tuple[str, float] | None:
    state = initialize_model_parallel(2, 2, timeout_seconds=1)
    for _ in range(70):
        state.tp.all_reduce(torch.zeros(5))
    state.pp.all_gather(torch.zeros(2, 2, dtype=torch.bfloat16))
    dist.barrier()
    result = None
    if state.rank == 2:
        began = time.perf_counter()
        with pytest.raises(CommunicationError) as caught:
            state.tp.all_reduce(torch.zeros(3), "max")
        result = str(caught.value), time.perf_counter() - began
    dist.barrier()
    return result


def test_a_timeout_tells_who_where_what_and_what_came_before(ranks: Any) -> None:
    results = ranks(4, never_answered)
    ranks.pool(4).reset()
    message, seconds = results[2]
    assert [result for result in results if result is None] == [None] * 3
    assert 0.9 < seconds < 10
    first, *rest = message.splitlines()
    assert first.startswith("rank 2 (tp=0 pp=1): all_reduce float32[3] max over tp [2, 3] failed: ")
    start = rest.index("The last operations of this rank:")
    history = rest[start + 1 :]
    assert len(history) == 64, "the ring buffer keeps the last 64"
    numbers = [int(line.split()[0].removeprefix("#")) for line in history]
    assert numbers == list(range(numbers[-1] - 63, numbers[-1] + 1))
    assert all("all_reduce" in line and "float32[5]" in line and line.endswith(" ms") for line in history[:62])
    assert "all_gather" in history[62]
    assert "bfloat16[2, 2]" in history[62]
    assert history[62].endswith(" ms")
    assert "float32[3]" in history[63]
    assert history[63].endswith("NOT FINISHED")


def whole_world_times_out() -> float | None:
    """The group of all ranks, which torch has made already, with its own timeout of half an hour."""
    state = initialize_model_parallel(2, timeout_seconds=1)
    seconds = None
    if state.rank == 0:
        began = time.perf_counter()
        with pytest.raises(CommunicationError):
            state.tp.all_reduce(torch.ones(1))
        seconds = time.perf_counter() - began
    dist.barrier()
    return seconds


def test_the_timeout_also_holds_where_a_group_is_the_whole_world(ranks: Any) -> None:
    seconds, _ = ranks(2, whole_world_times_out, timeout=20)
    ranks.pool(2).reset()
    assert 0.9 < seconds < 10


def copies_of_a_group() -> bool:
    g = initialize_model_parallel(2).tp
    return copy.deepcopy({"layer": g})["layer"] is g


def test_a_deep_copy_of_a_layer_keeps_its_group(ranks: Any) -> None:
    """A group is a connection, which cannot be copied."""
    assert ranks(2, copies_of_a_group) == [True, True]


# ---- the ledger ---------------------------------------------------------------------------------------------------------------


def count_from_outside(t: int) -> dict[str, list[tuple[str, int]]]:
    g = tensor_group(t)
    with Outside() as outside, ledger() as book:
        for dtype in DTYPES:
            x = torch.ones(2 * t, 3, dtype=dtype)
            g.all_reduce(x)
            g.all_reduce(x.t(), "max")
            g.all_gather(x)
            g.all_gather(x, -1)
            g.reduce_scatter(x)
            g.all_to_all(x, 0, 1)
            g.broadcast(x[:, :2], t - 1)
            if t > 1:
                ring(g, x)
            g.all_reduce(torch.ones((), dtype=dtype))
            g.all_reduce_async(x).wait()
    return {
        "outside": outside.communication,
        "ledger": [(record.op, record.payload) for record in book.records],
        "wire": [record.wire for record in book.records],  # type: ignore[dict-item]
        "phases": sorted({record.phase for record in book.records}),  # type: ignore[dict-item]
        "groups": sorted({record.group for record in book.records}),  # type: ignore[dict-item]
    }


@pytest.mark.parametrize("t", SIZES)
def test_ledger_equals_a_count_from_outside(ranks: Any, t: int) -> None:
    for seen in on_ranks(ranks, t, count_from_outside, t):
        if t == 1:
            assert not any(seen.values()), "a group of one rank says nothing"
            continue
        assert len(seen["ledger"]) == len(DTYPES) * 11
        # On gloo a reduce-scatter is an all-to-all of the same bytes.
        names = [("all_to_all" if op == "reduce_scatter" else op, payload) for op, payload in seen["ledger"]]
        assert names == seen["outside"]
        x = 2 * t * 3 * 8  # bytes of a float64 [2t, 3]
        assert seen["ledger"][:9] == [
            ("all_reduce", x),
            ("all_reduce", x),
            ("all_gather", t * x),
            ("all_gather", t * x),
            ("reduce_scatter", x),
            ("all_to_all", x),
            ("broadcast", x * 2 // 3),
            ("send", x),
            ("recv", x),
        ]
        share = (t - 1) / t
        ring_bytes = [2 * share * x] * 2 + [share * t * x] * 2 + [share * x] * 2 + [share * x * 2 / 3, x, 0]
        assert seen["wire"][:9] == pytest.approx(ring_bytes, rel=1e-12)
        assert (seen["phases"], seen["groups"]) == (["forward"], ["tp"])


@pytest.mark.parametrize(
    ("op", "payload", "size", "wire"),
    [
        ("all_reduce", 4, 4, 6),  # notebook 00: x = [rank + 1] on 4 ranks
        ("all_reduce", 1024, 4, 1536),
        ("all_gather", 1024, 4, 768),
        ("reduce_scatter", 1024, 4, 768),
        ("all_to_all", 1024, 2, 512),
        ("broadcast", 1024, 4, 768),
        ("send", 100, 7, 100),
        ("recv", 100, 7, 0),
        ("barrier", 100, 7, 0),
        ("all_reduce", 4, 3, 16 / 3),
        ("all_reduce", 2**60, 1024, 2 * 1023 * 2**50),  # exact: no float on the way
    ],
)
def test_wire_bytes_of_the_ring(op: str, payload: int, size: int, wire: float) -> None:
    assert wire_bytes(op, payload, size) == wire
    assert isinstance(wire_bytes(op, payload, size), int) == isinstance(wire, int)


def book_of_two_ranks() -> dict[str, Any]:
    g, x = tensor_group(2), torch.ones(4)
    with ledger() as outer:
        g.all_reduce(x)
        with ledger() as inner, phase("optimizer"):
            g.all_gather(x.double())
            with phase("norm"):
                g.all_reduce(x)
        g.broadcast(x, 0)
    with pytest.raises(ZeroDivisionError), ledger() as broken, phase("lost"):
        g.all_reduce(x).numel() // 0
    g.all_reduce(x)  # after the blocks: in no book
    return {
        "phases": [(record.op, record.phase) for record in outer.records],
        "inner": [record.op for record in inner.records],
        "broken": [record.phase for record in broken.records],
        "open": len(RECORDER.ledgers),
        "label": RECORDER.label,
        "totals": [
            outer.total(),
            outer.total("payload"),
            outer.total("count"),
            outer.total(group="tp", op="all_reduce"),
            outer.total("payload", phase="optimizer"),
            outer.total(group="pp"),
        ],
        "table": outer.table(),
    }


def test_ledgers_nest_filter_and_close(ranks: Any) -> None:
    for seen in ranks(2, book_of_two_ranks):
        assert seen["phases"] == [
            ("all_reduce", "forward"),
            ("all_gather", "optimizer"),
            ("all_reduce", "norm"),
            ("broadcast", "forward"),
        ]
        assert seen["inner"] == ["all_gather", "all_reduce"]
        assert seen["broken"] == ["lost"]
        assert (seen["open"], seen["label"]) == (0, None)
        assert seen["totals"] == [16 + 32 + 16 + 8, 16 + 64 + 16 + 16, 4, 32, 64, 0]
        assert seen["table"].splitlines() == [
            "all_reduce     tp         x1     payload           16 B   wire           16 B   forward",
            "all_gather     tp         x1     payload           64 B   wire           32 B   optimizer",
            "all_reduce     tp         x1     payload           16 B   wire           16 B   norm",
            "broadcast      tp         x1     payload           16 B   wire            8 B   forward",
        ]


def test_an_empty_book_and_a_bad_column() -> None:
    with ledger() as one, ledger() as other:
        assert one is not other
        assert RECORDER.ledgers[-2:] == [one, other]
    assert one not in RECORDER.ledgers
    assert one.table() == "(nothing was sent)"
    with pytest.raises(ValueError, match='field must be "wire", "payload" or "count", got \'bytes\''):
        one.total("bytes")  # type: ignore[arg-type]


def test_backward_is_a_phase_of_its_own() -> None:
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(RECORDER.phase())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(RECORDER.phase())
            return grads[0]

    Spy.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert [*seen, RECORDER.phase()] == ["forward", "backward", "forward"]


def test_flight_recorder_keeps_the_last_and_tells_its_observers() -> None:
    recorder, told = FlightRecorder(length=3), []
    recorder.observers.append(lambda entry: told.append(entry.op))
    entries = [recorder.start(f"op{i}", "tp", "float32[2]", 8, 2) for i in range(5)]
    recorder.finish(entries[3])
    lines = str(recorder).splitlines()
    assert [line.split()[:4] for line in lines] == [[f"#{i + 1}", f"op{i}", "tp", "float32[2]"] for i in (2, 3, 4)]
    assert ["NOT FINISHED" in line for line in lines] == [True, False, True]
    assert told == ["op0", "op1", "op2", "op3", "op4"]


def test_a_group_of_one_rank_needs_no_torch_distributed() -> None:
    g = single_process().tp
    before = threading.active_count()
    x = torch.arange(4.0)
    assert g.size == 1
    assert torch.equal(g.all_reduce(x), x)
    assert g.all_reduce_async(x).wait().data_ptr() != x.data_ptr()
    assert threading.active_count() == before
