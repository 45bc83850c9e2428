"""Dropout on every axis: whole masks make any layout equal to one process; which ranks share a mask, seen in a run on eight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from minimeg.comparison import compare_with_single_process
from minimeg.lab.drawings.masks import shared_masks
from minimeg.options import Options
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import full_state
from minimeg.rng import Key, agreement, recorded_masks
from minimeg.trainer import Trainer
from tests.test_trainer import SMALL, dataset

DROPPING = replace(SMALL, hidden_dropout=0.1, attention_dropout=0.1, train_iters=2, whole_dropout_masks=True)


def cut(tp: int = 1, pp: int = 1, n: int = 1, **more: Any) -> Options:
    return replace(
        DROPPING,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=n,
        **more,
    )


# name: (number of ranks, how it is cut)
LAYOUTS: dict[str, tuple[int, Options]] = {
    "tp2-dp2": (4, cut(2)),
    "tp4-sp": (4, cut(4, sequence_parallel=True)),
    "tp2-sp-dp2-full": (4, cut(2, sequence_parallel=True, recompute_granularity="full", recompute_num_layers=3)),
    "tp2-pp2-distributed": (4, cut(2, 2, recompute_granularity="full", distribute_saved_activations=True)),
    "tp2-sp-pp2-window": (4, cut(2, 2, sequence_parallel=True, recompute_granularity="full", recompute_keep_microbatches=1)),
    "pp4-zb-h1-selective": (4, cut(1, 4, schedule="zb-h1", recompute_granularity="selective")),
    "pp2-n2-dp2": (4, cut(1, 2, 2)),
    "tp2-sp-pp2-n2-dp2": (8, cut(2, 2, 2, sequence_parallel=True, recompute_granularity="selective")),
}  # fmt: skip


def train(options: Options) -> tuple[list[float], str, list[torch.Tensor]]:
    """Losses, the verdict (of rank 0), and the default generator's state after each step."""
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, dataset())
    torch.manual_seed(99)
    losses, generators = [], []
    for step in range(options.train_iters):
        losses.append(trainer.step(step).loss)
        generators.append(torch.get_rng_state())
    parameters = full_state(trainer.chunks, state)
    if state.rank != 0:
        return losses, "", generators
    return losses, compare_with_single_process(options, trainer.dataset, losses, parameters, "cpu").text, generators


@pytest.mark.parametrize("name", LAYOUTS)
def test_with_whole_masks_any_layout_equals_one_process(ranks: Any, name: str) -> None:
    """Dropout 0.1 everywhere: losses and parameters after two steps within 1e-9, and the global generator equal on all ranks."""
    world, options = LAYOUTS[name]
    assert replace(options, compare_with_single_process=True).faults(world) == []
    results = ranks(world, train, options)
    assert results[0][1].startswith("PASS"), results[0][1]
    for _, _, generators in results:
        for mine, first in zip(generators, results[0][2], strict=True):
            assert torch.equal(mine, first), "the global generator differs"


def test_dropout_makes_a_difference(ranks: Any) -> None:
    """So that the test above cannot pass by itself: other masks, other losses."""
    whole = ranks(4, train, cut(2))[0]
    own = ranks(4, train, replace(cut(2), whole_dropout_masks=False))[0]
    none = ranks(4, train, replace(cut(2), hidden_dropout=0.0, attention_dropout=0.0))[0]
    assert own[1].startswith("FAIL"), "masks by tp index are not those of one process"
    assert none[1].startswith("PASS")
    first = [losses[0] for losses, *_ in (whole, own, none)]
    assert min(abs(a - b) for a, b in ((first[0], first[1]), (first[0], first[2]), (first[1], first[2]))) > 1e-4


def test_without_whole_masks_the_pipeline_and_recomputation_still_make_no_difference(ranks: Any) -> None:
    """One tensor-parallel size, masks by tp index: the same for every p, schedule and recomputation."""
    base = replace(cut(2, sequence_parallel=True), whole_dropout_masks=False, global_batch_size=4)
    layouts = [
        (2, base),
        (4, replace(base, pipeline_model_parallel_size=2)),
        (4, replace(base, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
        (4, replace(base, pipeline_model_parallel_size=2, schedule="zb-v", recompute_granularity="full")),
        (4, replace(base, recompute_granularity="selective")),  # d = 2
    ]
    losses = [ranks(world, train, options)[0][0] for world, options in layouts]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-10)


# ---- masks as pictures -----------------------------------------------------------------------------------------------------------

COIN = replace(
    cut(2, 2), whole_dropout_masks=False, hidden_dropout=0.5, attention_dropout=0.5,
    hidden_size=64, seq_length=16, micro_batch_size=8, global_batch_size=32,
)  # fmt: skip


def first_masks(options: Options) -> tuple[str, dict[str, list[list[float]]], dict[Key, int]]:
    """Where this rank stands; how its first masks agree with the others'; and how often it drew each key, once equal each time."""
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, dataset())
    with recorded_masks() as seen:
        trainer.step(0)
    drawn: dict[Key, list[torch.Tensor]] = {}
    for key, mask in seen:
        drawn.setdefault(key, []).append(mask)
    assert all(torch.equal(masks[0], other) for masks in drawn.values() for other in masks)
    found = {}
    for title, call in (("attention probabilities", 0), ("residual stream", 1)):
        mask = next(masks[0] for key, masks in drawn.items() if key.call == call and key.layer < options.num_layers)
        assert mask.numel() >= 4096
        found[title] = agreement(mask, state.world)
    at = state.grid.coordinates(state.rank)
    where = f"r{state.rank} tp{at['tp']} dp{at['dp']} pp{at['pp']}"
    return where, found, {key: len(masks) for key, masks in drawn.items()}


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
def test_which_of_eight_ranks_share_a_mask(ranks: Any, sp: bool) -> None:
    """CASE 22 in a training step on tp2 pp2 dp2, and its picture."""
    results = ranks(8, first_masks, replace(COIN, sequence_parallel=sp, recompute_granularity="full"))
    labels = [where for where, _, _ in results]
    assert labels[0] == "r0 tp0 dp0 pp0"
    assert labels[7] == "r7 tp1 dp1 pp1"
    panels = results[0][1]
    for title, square in panels.items():
        for i, row in enumerate(square):
            for j, fraction in enumerate(row):
                alike = i == j or (title == "residual stream" and not sp and i // 2 == j // 2)
                assert fraction == 1 if alike else abs(fraction - 0.5) < 0.03, (title, i, j)
    for _, same, drawn in results:
        assert same == panels
        layers = {key.layer for key in drawn} - {4}
        assert len(layers) == 2
        # Replays draw again. What lies outside the layers, the embedding's mask, is drawn once.
        assert {count for key, count in drawn.items() if key.layer in layers} == {2}
        assert {count for key, count in drawn.items() if key.layer == 4} <= {1}
    svg = shared_masks(panels, labels)
    root = ElementTree.fromstring(svg)
    colours = [rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert colours.count("#0072B2") == 1 + (8 if sp else 16) + 8
    assert shared_masks(panels, labels) == svg
    assert root.find("{http://www.w3.org/2000/svg}desc").text.startswith("Blue where two ranks draw the same mask")


def test_the_picture_refuses_what_is_no_square() -> None:
    with pytest.raises(ValueError, match=r"2 x 2 fractions.*not so: b"):
        shared_masks({"a": [[1, 0.5], [0.5, 1]], "b": [[1, 0.5]]}, ["r0", "r1"])
    with pytest.raises(ValueError, match="no panel"):
        shared_masks({}, ["r0"])


@pytest.mark.parametrize(("p", "expected"), [(0.5, 0.5), (0.25, 0.625), (0.1, 0.82)])
def test_independent_masks_agree_by_chance(p: float, expected: float) -> None:
    masks = [torch.empty(20000, dtype=torch.bool).bernoulli_(1 - p, generator=Key(i).generator()) for i in range(2)]
    assert p**2 + (1 - p) ** 2 == pytest.approx(expected)
    assert float((masks[0] == masks[1]).double().mean()) == pytest.approx(expected, abs=0.02)
    assert agreement(masks[0], single_process().tp) == [[1.0]]
