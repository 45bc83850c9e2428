"""PipeDream and PipeDream-2BW on real ranks, against a replay of the published formulas in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from minimeg.comm import ledger
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.pipeline import run
from minimeg.recompute import checkpoint
from minimeg.schedule import Schedule, build, prove
from tests.pipeline.stages import Block, Live, Sample, chunks_of, loss, samples, watched

RATE, NORMALISER = 0.05, 8.0
Weights = dict[str, Tensor]


def published(schedule: Schedule) -> list[tuple[list[int], list[int]]]:
    """Per update the micro-batches (from 0) whose gradients make it, and by stage the version they use, from the formulas alone.

    PipeDream:  w(t+1) = w(t) - lr * grad f(w1(t-n+1), ..., wn(t)), micro-batch t, versions clamped at 0.
    2BW:        w(t+1) = w(t) - lr * grad f(w(t-1)), f over the micro-batches t p ... (t+1) p - 1, clamped at 0.
    """
    n, m = schedule.stages, schedule.microbatches
    if schedule.updates == "each":
        return [([t], [max(t - n + s, 0) for s in range(1, n + 1)]) for t in range(m)]
    return [(list(range(t * n, min((t + 1) * n, m))), [max(t - 1, 0)] * n) for t in range(-(-m // n))]


def replay(
    stages: int, batch: list[Sample], updates: list[tuple[list[int], list[int]]], frozen: tuple[str, ...] = ()
) -> tuple[list[list[Weights]], float]:
    """versions[stage][t] = w_stage(t), and the loss, in one process by autograd and functional_call alone."""
    blocks = [Block(number) for number in range(stages)]
    versions = [[{name: p.detach().clone() for name, p in block.named_parameters()}] for block in blocks]
    total = 0.0
    for indices, chosen in updates:
        weights = [
            {name: w.clone().requires_grad_() for name, w in versions[s][chosen[s]].items()} for s in range(stages)
        ]
        for index in indices:
            x: Any = None
            for block, own in zip(blocks, weights, strict=True):
                x = functional_call(block, own, (x, batch[index]))
            part = loss(x, batch[index]) / NORMALISER
            part.backward()
            total += float(part.detach())
        for s in range(stages):
            newest = versions[s][-1]
            versions[s].append(
                {name: w if f"{s}.{name}" in frozen else w - RATE * weights[s][name].grad for name, w in newest.items()}
            )
    return versions, total


def train(
    schedule: Schedule,
    recompute: bool = False,
    one_tag: bool = False,
    unequal: bool = False,
    frozen: tuple[str, ...] = (),
) -> list[tuple[int, Weights, float, int]]:
    """Per virtual stage of this rank: its number, its weights after the run, the loss, and how many versions were held at once."""
    pp = single_process().pp
    if schedule.stages > 1:
        pp = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
    live, group = Live(), watched(pp, one_tag)
    blocks = chunks_of(schedule, pp.rank, None if recompute else live)
    for block in blocks:
        for name, param in block.named_parameters():
            param.requires_grad_(f"{block.number}.{name}" not in frozen)
        if recompute:
            block.forward = partial(checkpoint, block.forward)  # type: ignore[method-assign]
    before = [param.data_ptr() for block in blocks for param in block.parameters()]
    result = run(
        schedule,
        blocks,
        samples(schedule.microbatches, unequal),
        group=group,
        loss=loss,
        normaliser=NORMALISER,
        learning_rate=RATE,
    )
    assert before == [param.data_ptr() for block in blocks for param in block.parameters()], "they stay where they are"
    assert all(param.grad is None for block in blocks for param in block.parameters())
    assert result.actions == schedule.ranks[pp.rank]
    assert recompute or frozen or live.peak == prove(schedule).peak_in_flight[pp.rank]
    assert live.held == {}
    assert live.kept_outputs == 0
    assert group.outstanding == 0
    assert group.peak <= schedule.stages or not schedule.name.startswith("pipedream")
    found = []
    for block in blocks:
        weights = {name: param.detach().clone() for name, param in block.named_parameters()}
        found.append((block.number, weights, float(result.loss), result.weight_versions))
    return found


def train_all(todo: list[Schedule], **how: Any) -> list[list[tuple[int, Weights, float, int]]]:
    return [train(schedule, **how) for schedule in todo]


def compare(
    schedule: Schedule,
    found: list[list[tuple[int, Weights, float, int]]],
    updates: list[tuple[list[int], list[int]]],
    unequal: bool = False,
    frozen: tuple[str, ...] = (),
) -> None:
    batch = samples(schedule.microbatches, unequal)
    versions, total = replay(schedule.virtual_stages, batch, updates, frozen)
    for rank, of_rank in enumerate(found):
        for stage, weights, value, held in of_rank:
            assert value == pytest.approx(total, abs=1e-10)
            for key, weight in weights.items():
                assert float((weight - versions[stage][-1][key]).abs().max()) <= 1e-10, (schedule.name, stage, key)
                assert f"{stage}.{key}" in frozen or not torch.equal(weight, versions[stage][-2][key]), (
                    "the last update"
                )
            # PipeDream: one version for each micro-batch in flight; an update needs the old and the new. 2BW: a double buffer.
            most = max(prove(schedule).peak_in_flight[rank], 2) if schedule.updates == "each" else 2
            assert held <= most, (schedule.name, rank, held)
            assert schedule.updates == "2bw" or schedule.microbatches < 2 * schedule.stages or held == most


CASES = [build("pipedream", p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 7, 8)]
CASES += [build("pipedream-2bw", p, m) for p in (1, 2, 3, 4) for m in (p, p + 1, 2 * p, 3 * p + 1, 4 * p)]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_weights_follow_the_published_formula(run_on_ranks: Any, p: int) -> None:
    todo = [schedule for schedule in CASES if schedule.stages == p]
    everybody = run_on_ranks(p, train_all, todo) if p > 1 else [train_all(todo)]
    for number, schedule in enumerate(todo):
        compare(schedule, [of_rank[number] for of_rank in everybody], published(schedule))


@pytest.mark.parametrize("how", [{"one_tag": True}, {"unequal": True}])
def test_tags_and_lengths_do_not_matter(run_on_ranks: Any, how: dict[str, bool]) -> None:
    todo = [build("pipedream", 2, 7), build("pipedream-2bw", 2, 7)]
    everybody = run_on_ranks(2, train_all, todo, **how)
    for number, schedule in enumerate(todo):
        found = [of_rank[number] for of_rank in everybody]
        compare(schedule, found, published(schedule), how.get("unequal", False))


@pytest.mark.parametrize("frozen", [("1.linear.weight",)])
def test_what_is_frozen_stays(run_on_ranks: Any, frozen: tuple[str, ...]) -> None:
    """A single weight: the rest is updated as if it were a number."""
    todo = [build("pipedream", 3, 7), build("pipedream-2bw", 3, 7)]
    everybody = run_on_ranks(3, train_all, todo, frozen=frozen)
    for number, schedule in enumerate(todo):
        compare(schedule, [of_rank[number] for of_rank in everybody], published(schedule), frozen=frozen)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_stale_weights_are_not_those_of_a_flush(name: str) -> None:
    """The replay with the newest version everywhere, which is plain SGD, gives other numbers: staleness is real, and tested."""
    schedule = build(name, 3, 9)
    versions, _ = replay(3, samples(9), published(schedule))
    blocks = [Block(number) for number in range(3)]
    group = 1 if name == "pipedream" else 3
    for start in range(0, 9, group):
        for block in blocks:
            block.zero_grad()
        for sample in samples(9)[start : start + group]:
            x: Any = None
            for block in blocks:
                x = block(x, sample)
            (loss(x, sample) / NORMALISER).backward()
        with torch.no_grad():
            for block in blocks:
                for param in block.parameters():
                    param -= RATE * param.grad
    plain = blocks[0].linear.weight
    assert float((versions[0][-1]["linear.weight"] - plain.detach()).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_recomputation_uses_the_version_of_the_forward(run_on_ranks: Any, name: str) -> None:
    schedule = build(name, 3, 7)
    found = run_on_ranks(3, train, schedule, recompute=True)
    compare(schedule, found, published(schedule))
    for plain, again in zip(run_on_ranks(3, train, schedule), found, strict=True):
        for (_, weights, value, _), (_, other, other_value, _) in zip(plain, again, strict=True):
            assert value == other_value
            assert all(torch.equal(weights[key], other[key]) for key in weights)


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def refused(schedule: Schedule, **changes: Any) -> tuple[str, int]:
    pp = initialize_model_parallel(pipeline_model_parallel_size=2).pp
    arguments: dict[str, Any] = {"chunks": chunks_of(schedule, pp.rank), "learning_rate": RATE} | changes
    if arguments["chunks"] == "tied GPT":
        config = GPTConfig(2, 8, 2, 16, 8)
        arguments["chunks"] = [GPT(config, initialize_model_parallel(1, 2).tp, pp.rank, 2)]
    if arguments["chunks"] == "shared weight":
        first, second = arguments["chunks"] = chunks_of(schedule, pp.rank)
        second.linear.weight = first.linear.weight
    batch = samples(schedule.microbatches)
    with ledger() as book, pytest.raises(ValueError) as error:
        run(schedule, arguments.pop("chunks"), batch, group=pp, loss=loss, normaliser=1.0, **arguments)
    return str(error.value), len(book.records)


EACH = build("pipedream", 2, 3)
SPLIT = replace(build("zb-h1", 2, 3), updates="each")
TWO_CHUNKS = replace(build("interleaved", 2, 4), updates="each")
EVALUATION = replace(build("forward-only", 2, 3), updates="2bw")
TOO_FEW = replace(build("1f1b", 2, 1), updates="2bw")
NOT_YET = replace(build("gpipe", 2, 6), updates="2bw")  # F4 needs the version that B0 and B1 make
DISORDER = Schedule.parse("# updates=2bw\nF0 F1 B1 B0\nF0 F1 B1 B0")


@pytest.mark.parametrize(
    ("schedule", "changes", "words"),
    [
        (EACH, {"learning_rate": None}, "learning_rate=None must be a positive number, e.g. 0.1"),
        (EACH, {"learning_rate": -1.0}, "learning_rate=-1.0 must be a positive number"),
        (EACH, {"on_gradients_ready": print}, "need a schedule with a flush"),
        (EACH, {"before_last_backward": print}, "need a schedule with a flush"),
        (EACH, {"chunks": "tied GPT"}, "is tied over stages, whose versions differ; use an untied head"),
        (TWO_CHUNKS, {"chunks": "shared weight"}, "linear.weight is tied over stages, whose versions differ"),
        (SPLIT, {}, "updates='each' goes with F and B only"),
        (EVALUATION, {}, "updates='2bw' goes with F and B only"),
        (TOO_FEW, {}, "updates='2bw' needs the gradients of 2 micro-batches, one a stage, for an update, got 1; use 2"),
        (NOT_YET, {}, "rank 0: F0.4 stands before B0.0, but updates='2bw' makes its versions from backwards in order"),
        (DISORDER, {}, "rank 0: B0.1 stands before B0.0"),
    ],
)
def test_what_cannot_update_while_it_runs_is_refused(
    run_on_ranks: Any, schedule: Schedule, changes: dict[str, Any], words: str
) -> None:
    for message, sent in run_on_ranks(2, refused, schedule, **changes):
        assert words in message
        assert sent == 0
