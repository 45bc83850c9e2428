"""PipeDream and PipeDream-2BW on real ranks, against a replay of the published formulas in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from minimeg.comm import ledger
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.parallel_state import initialize_model_parallel
from minimeg.pipeline import run
from minimeg.recompute import checkpoint
from minimeg.schedule import Schedule, build
from tests.pipeline.stages import Block, Sample, chunks_of, loss, samples

RATE, NORMALISER = 0.05, 8.0
Weights = dict[str, Tensor]


def replay(schedule: Schedule, batch: list[Sample]) -> list[list[Weights]]:
    """versions[stage][t] = w_stage(t), from the formulas alone.

    PipeDream:  w(t+1) = w(t) - lr * grad f(w1(t-n+1), ..., wn(t)), micro-batch t (from 0), versions clamped at 0.
    2BW:        w(t+1) = w(t) - lr * grad f(w(t-1)), f over the micro-batches t p ... (t+1) p - 1, clamped at 0.
    """
    n, m = schedule.stages, schedule.microbatches
    blocks = [Block(number) for number in range(n)]
    versions = [[{name: p.detach().clone() for name, p in block.named_parameters()}] for block in blocks]
    if schedule.updates == "each":
        steps = [([t], [max(t - n + s, 0) for s in range(1, n + 1)]) for t in range(m)]
    else:
        steps = [(list(range(t * n, min((t + 1) * n, m))), [max(t - 1, 0)] * n) for t in range(-(-m // n))]
    for indices, chosen in steps:
        weights = [{name: w.clone().requires_grad_() for name, w in versions[s][chosen[s]].items()} for s in range(n)]
        for index in indices:
            x: Any = None
            for block, own in zip(blocks, weights, strict=True):
                x = functional_call(block, own, (x, batch[index]))
            (loss(x, batch[index]) / NORMALISER).backward()
        for s in range(n):
            newest = versions[s][-1]
            versions[s].append({name: w - RATE * weights[s][name].grad for name, w in newest.items()})
    return versions


def train(schedule: Schedule, recompute: bool = False) -> tuple[dict[str, Tensor], float, int, bool]:
    pp = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
    (block,) = chunks_of(schedule, pp.rank)
    if recompute:
        plain = block.forward
        block.forward = lambda x, sample: checkpoint(plain, x, sample)  # type: ignore[method-assign]
    before = {name: param.data_ptr() for name, param in block.named_parameters()}
    result = run(
        schedule,
        [block],
        samples(schedule.microbatches),
        group=pp,
        loss=loss,
        normaliser=NORMALISER,
        learning_rate=RATE,
    )
    same = before == {name: param.data_ptr() for name, param in block.named_parameters()}
    assert result.actions == schedule.ranks[pp.rank]
    weights = {name: param.detach().clone() for name, param in block.named_parameters()}
    return weights, float(result.loss), result.weight_versions, same


CASES = [("pipedream", p, m) for p in (2, 3, 4) for m in (1, 2, 3, 4, 7, 8)]
CASES += [("pipedream-2bw", p, m) for p in (2, 3, 4) for m in (p, p + 1, 2 * p, 3 * p + 1, 4 * p)]


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_weights_follow_the_published_formula(run_on_ranks: Any, name: str, p: int, m: int) -> None:
    schedule = build(name, p, m)
    versions = replay(schedule, samples(m))
    for stage, (weights, _, held, same) in enumerate(run_on_ranks(p, train, schedule)):
        for key, weight in weights.items():
            assert float((weight - versions[stage][-1][key]).abs().max()) <= 1e-10, (stage, key)
            assert m == 1 or not torch.equal(weight, versions[stage][-2][key]), "the last update must be in"
        assert same, "the parameters themselves stay where they are"
        # PipeDream: one version for each micro-batch in flight, and the newest. 2BW: two (and for a moment the one just made).
        assert held <= (min(p - stage, m) + 1 if name == "pipedream" else 3)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_stale_weights_are_not_those_of_a_flush(name: str) -> None:
    """The replay with the newest version everywhere, which is plain SGD, gives other numbers: staleness is real, and tested."""
    schedule = build(name, 3, 9)
    versions = replay(schedule, samples(9))
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
    plain, again = run_on_ranks(3, train, schedule), run_on_ranks(3, train, schedule, recompute=True)
    for (weights, value, *_), (other, other_value, *_) in zip(plain, again, strict=True):
        assert value == other_value
        assert all(torch.equal(weights[key], other[key]) for key in weights)


def refused(**changes: Any) -> tuple[str, int]:
    pp = initialize_model_parallel(pipeline_model_parallel_size=2).pp
    schedule = build("pipedream", 2, 3)
    arguments: dict[str, Any] = {"chunks": chunks_of(schedule, pp.rank), "learning_rate": RATE} | changes
    if arguments["chunks"] == "tied GPT":
        config = GPTConfig(2, 8, 2, 16, 8)
        arguments["chunks"] = [GPT(config, initialize_model_parallel(1, 2).tp, pp.rank, 2)]
    with ledger() as book, pytest.raises(ValueError) as error:
        run(schedule, arguments.pop("chunks"), samples(3), group=pp, loss=loss, normaliser=1.0, **arguments)
    return str(error.value), len(book.records)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": None}, "learning_rate=None must be a positive number, e.g. 0.1"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be a positive number"),
        ({"on_gradients_ready": print}, "need a schedule with a flush"),
        ({"chunks": "tied GPT"}, "use an untied head"),
    ],
)
def test_what_cannot_update_while_it_runs_is_refused(run_on_ranks: Any, changes: dict[str, Any], words: str) -> None:
    for message, sent in run_on_ranks(2, refused, **changes):
        assert words in message
        assert sent == 0
