"""Whole training steps on real ranks: the same numbers everywhere, and the same as one process."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg.comparison import compare_with_single_process
from minimeg.data import TextDataset, encode
from minimeg.faults import BOX
from minimeg.invariants import InvariantError
from minimeg.ledger import RECORDER, Entry
from minimeg.models.config import layers_of
from minimeg.options import Options
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import full_state, named_shards
from minimeg.trainer import StepReport, Trainer

# No sixteen characters of it occur twice, so that a window is known by its content.
TEXT = "".join(f"def f_{i}(x): return {i * i}\n" for i in range(300))
SMALL = Options(
    hidden_size=16,
    num_attention_heads=4,
    seq_length=16,
    micro_batch_size=1,
    global_batch_size=8,
    train_iters=4,
    eval_iters=2,
    dtype="float64",
    clip_grad=0.5,
)
LAYOUTS = {
    "tp2-pp2": replace(SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2-dp2": replace(SMALL, tensor_model_parallel_size=2),
    "pp4-untied": replace(SMALL, pipeline_model_parallel_size=4, untie_embeddings_and_output_weights=True),
    "pp2-n2-dp2": replace(SMALL, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "tp2-pp2-gpipe-sgd": replace(
        SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, schedule="gpipe", optimizer="sgd"
    ),
    "pp4-zb-h1": replace(SMALL, pipeline_model_parallel_size=4, schedule="zb-h1"),
    "pp2-zb-v-dp2": replace(SMALL, pipeline_model_parallel_size=2, schedule="zb-v"),
    "tp2-sp-pp2": replace(
        SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True, num_layers=3
    ),
}


def dataset() -> TextDataset:
    return TextDataset(encode(TEXT), SMALL.seq_length)


def started(options: Options, steps: int) -> tuple[Trainer, list[StepReport]]:
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, dataset())
    return trainer, [trainer.step(step) for step in range(steps)]


def judged(options: Options) -> tuple[list[StepReport], float, str, str]:
    """Reports and validation loss of this rank; rank 0 also the verdict, and the verdict on parameters that are off by a little."""
    trainer, reports = started(options, options.train_iters)
    validation = trainer.evaluate()
    parameters = full_state(trainer.chunks, trainer.state)
    if trainer.state.rank != 0:
        return reports, validation, "", ""
    losses = [report.loss for report in reports]
    verdict = compare_with_single_process(options, trainer.dataset, losses, parameters, "cpu")
    parameters["final_layernorm.bias"][3] += 1e-8
    other = compare_with_single_process(options, trainer.dataset, losses, parameters, "cpu")
    return reports, validation, verdict.text, other.text


def alone(options: Options) -> tuple[list[StepReport], float]:
    one = replace(
        options,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=1,
        schedule=None,
        sequence_parallel=False,
    )
    trainer = Trainer(one, single_process(), dataset())
    return [trainer.step(step) for step in range(options.train_iters)], trainer.evaluate()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_like_one_process(ranks: Any, name: str) -> None:
    """CASES 19, 29: the same norm, factor and loss on every rank of every stage."""
    results = ranks(4, judged, LAYOUTS[name])
    assert all(result[:2] == results[0][:2] for result in results), "not the same numbers on every rank"
    reports, validation, verdict, other = results[0]
    assert verdict.startswith("PASS"), verdict
    assert other.startswith("FAIL")
    assert "1.0e-08 in final_layernorm.bias" in other
    expected, expected_validation = alone(LAYOUTS[name])
    assert [r.norm for r in reports] == pytest.approx([r.norm for r in expected], abs=1e-10)
    assert validation == pytest.approx(expected_validation, abs=1e-9)
    assert min(r.norm for r in reports) > SMALL.clip_grad, "nothing was clipped, so nothing was shown"
    assert [r.loss for r in reports] != sorted({r.loss for r in reports} | {0.0}), "the loss must fall"


def step_of(options: Options) -> tuple[float, float, dict[str, Tensor]]:
    trainer, (report,) = started(options, 1)
    return report.loss, report.norm, full_state(trainer.chunks, trainer.state)


def test_gradients_do_not_depend_on_the_number_of_microbatches(ranks: Any) -> None:
    """CASE 36: one global batch, cut into m = 8, 4, 2, 1 micro-batches over two stages."""
    cuts = [replace(SMALL, pipeline_model_parallel_size=2, optimizer="sgd", micro_batch_size=b) for b in (1, 2, 4, 8)]
    outcomes = [ranks(2, step_of, options)[0] for options in cuts]
    loss, norm, parameters = outcomes[0]
    for other_loss, other_norm, other in outcomes[1:]:
        assert (other_loss, other_norm) == pytest.approx((loss, norm), abs=1e-10)
        assert all((other[name] - value).abs().max() <= 1e-10 for name, value in parameters.items())


# ---- eight ranks: tp = pp = dp = 2 -------------------------------------------------------------------------------------------

CUBE = replace(SMALL, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def read_tokens(steps: int) -> tuple[dict[str, int], list[list[str]]]:
    """Where this rank stands, and what it read: a fingerprint of every window, per step."""
    state = initialize_model_parallel(2, 2)
    trainer = Trainer(CUBE, state, dataset())
    read = []
    for step in range(steps):
        batches = trainer.dataset.microbatches(step, seed=CUBE.seed, **trainer._batch_layout())
        read.append([hashlib.sha256(row.numpy().tobytes()).hexdigest() for mb in batches for row in mb.tokens])
    return state.grid.coordinates(state.rank), read


def test_data_parallel_ranks_read_disjoint_parts_of_an_epoch(ranks: Any) -> None:
    """CASE 03: equal inside (tp, pp), disjoint over dp, an epoch read exactly once."""
    windows = len(dataset())
    steps = windows // CUBE.global_batch_size  # as many whole steps as the epoch has
    everybody = ranks(8, read_tokens, steps)
    of_dp = {at["dp"]: read for at, read in everybody}
    assert all(read == of_dp[at["dp"]] for at, read in everybody)
    for first, second in zip(of_dp[0], of_dp[1], strict=True):
        assert len(first) == len(second) == CUBE.global_batch_size // 2
    seen = [window for read in of_dp.values() for step in read for window in step]
    assert len(seen) == len(set(seen)) == steps * CUBE.global_batch_size


def hashes(steps: int) -> tuple[dict[str, int], list[dict[str, tuple[bool, str]]]]:
    """{parameter: (is it cut over tp, fingerprint)} before and after some steps."""
    state = initialize_model_parallel(2, 2)
    trainer = Trainer(CUBE, state, dataset())

    def look() -> dict[str, tuple[bool, str]]:
        return {
            f"{name}": (shard.parts > 1, hashlib.sha256(param.detach().numpy().tobytes()).hexdigest())
            for name, param, shard in named_shards(trainer.chunks)
        }

    before = look()
    for step in range(steps):
        trainer.step(step)
    return state.grid.coordinates(state.rank), [before, look()]


def test_shards_differ_and_replicas_do_not(ranks: Any) -> None:
    """CASE 13: different inside tp where cut, equal where not, equal over dp; at the start and after five steps."""
    everybody = ranks(8, hashes, 5)
    for when in (0, 1):
        at = {tuple(where.values()): seen[when] for where, seen in everybody}
        for where, seen in everybody:
            tp_twin = at[tuple((where | {"tp": 1 - where["tp"]}).values())]
            dp_twin = at[tuple((where | {"dp": 1 - where["dp"]}).values())]
            assert dp_twin == seen[when]
            for name, (cut, fingerprint) in seen[when].items():
                # Biases start at 0 and norms at 1 everywhere, so equal shards mean nothing there.
                if cut and (when == 1 or name.endswith("weight")):
                    assert tp_twin[name][1] != fingerprint, name
                if not cut:
                    assert tp_twin[name][1] == fingerprint, name
    first = everybody[0][1]
    assert first[0] != first[1]
    # tp = 0: the first stage holds the word embedding, the last its copy.
    assert first[1]["embedding.word_embeddings.weight"] == everybody[4][1][1]["output_layer.weight"]
    assert everybody[4][0] | {"pp": 0} == everybody[0][0]


# ---- no collective that only some ranks call ---------------------------------------------------------------------------------


def collectives_of(options: Options) -> dict[str, list[str]]:
    """Per group the collectives of three steps with an evaluation after the second, in order."""
    seen: dict[str, list[str]] = {}

    def note(entry: Entry) -> None:
        if entry.op not in ("send", "recv"):
            seen.setdefault(f"{entry.group}", []).append(f"{entry.op} {entry.what}")

    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, dataset())
    RECORDER.observers.append(note)
    try:
        for step in range(3):
            trainer.step(step)
            if step == 1:
                trainer.evaluate()
    finally:
        RECORDER.observers.remove(note)
    return {f"{name} {list(getattr(state, name).ranks)}": ops for name, ops in seen.items() if hasattr(state, name)}


@pytest.mark.parametrize("name", ["pp4-untied", "tp2-pp2", "pp2-n2-dp2"])
def test_all_members_of_a_group_call_the_same_collectives(ranks: Any, name: str) -> None:
    """CASE 29."""
    of_group: dict[str, list[list[str]]] = {}
    for seen in ranks(4, collectives_of, LAYOUTS[name]):
        for group, operations in seen.items():
            of_group.setdefault(group, []).append(operations)
    assert of_group
    for group, calls in of_group.items():
        assert all(operations == calls[0] for operations in calls), group
        assert len(calls) == group.count(",") + 1, f"{group}: only some members communicated"


# ---- layers ------------------------------------------------------------------------------------------------------------------


def test_every_layer_lies_in_exactly_one_stage() -> None:
    """CASE 31."""
    for layers in range(1, 25):
        for stages in range(1, 13):
            if layers < stages:
                with pytest.raises(ValueError, match=f"num_layers={layers} is less than the {stages} virtual stages"):
                    layers_of(0, stages, layers)
                continue
            parts = [layers_of(stage, stages, layers) for stage in range(stages)]
            assert [index for part in parts for index in part] == list(range(layers))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # Megatron-LM issue 513: 8 layers, pp2 vpp2: rank 0 holds [0, 1] and [4, 5], rank 1 [2, 3] and [6, 7].
    assert [list(layers_of(stage, 4, 8)) for stage in (0, 2, 1, 3)] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def count(options: Options) -> list[tuple[str, int]]:
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, dataset())
    return [(name, param.numel()) for name, param, shard in named_shards(trainer.chunks) if not shard.tied_to]


@pytest.mark.parametrize("layers", [5, 7])
def test_no_parameter_is_lost_where_layers_do_not_divide(ranks: Any, layers: int) -> None:
    options = replace(SMALL, num_layers=layers, pipeline_model_parallel_size=4)
    found = [one for rank in ranks(4, count, options) for one in rank]
    whole = Trainer(replace(options, pipeline_model_parallel_size=1), single_process(), dataset())
    assert sorted(found) == sorted((name, param.numel()) for name, param, _ in named_shards(whole.chunks))


def mixed_texts() -> str:
    from minimeg.train import _require_same_text

    state = initialize_model_parallel()
    own = TextDataset(encode(TEXT if state.rank != 2 else TEXT.replace("x", "y")), SMALL.seq_length)
    with pytest.raises(RuntimeError) as error:
        _require_same_text(own, state)
    return str(error.value)


def test_ranks_that_read_different_texts_are_named(ranks: Any) -> None:
    assert set(ranks(4, mixed_texts)) == {
        "ranks [2] read another text than rank 0; give all the same files with --data-path"
    }


def test_the_comparison_does_not_pass_on_nan() -> None:
    trainer = Trainer(SMALL, single_process(), dataset())
    reports = [trainer.step(step) for step in range(2)]
    state = full_state(trainer.chunks, trainer.state)
    good = compare_with_single_process(SMALL, trainer.dataset, [r.loss for r in reports], state, "cpu")
    bad = compare_with_single_process(SMALL, trainer.dataset, [reports[0].loss, float("nan")], state, "cpu")
    assert good.passed
    assert not bad.passed
    state["final_layernorm.bias"][0] = torch.nan
    assert not compare_with_single_process(SMALL, trainer.dataset, [r.loss for r in reports], state, "cpu").passed


# ---- faults on purpose -------------------------------------------------------------------------------------------------------


def spoilt(options: Options, rank: int) -> tuple[list[str | None], dict[str, Tensor]]:
    """Steps 0 to 2 with a NaN in a gradient of one rank in step 1: what was skipped, and the parameters."""
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer, skipped = Trainer(options, state, dataset()), []
    for step in range(3):
        if step == 1 and state.rank == rank:
            BOX.planted.add("nan")
        trainer.step(step)
        skipped.append(trainer.optimizer.skipped)
    return skipped, full_state(trainer.chunks, state)


def test_a_spoilt_gradient_is_named_and_the_step_skipped_by_all(ranks: Any) -> None:
    options = replace(LAYOUTS["tp2-pp2"], on_nonfinite="skip")
    everybody = ranks(4, spoilt, options, 3)
    assert all(skipped == everybody[0][0] for skipped, _ in everybody)
    (before, during, after), parameters = everybody[0]
    assert (before, after) == (None, None)
    assert during is not None
    assert "step 1: the gradient of layers.2." in during
    assert "ranks [3]" in during
    assert all(bool(value.isfinite().all()) for value in parameters.values())


def holding(options: Options) -> str:
    return str(started(options, 2)[0].invariants)


@pytest.mark.parametrize("name", ["tp2-pp2", "tp2-sp-pp2", "pp2-n2-dp2"])
def test_the_invariants_hold_in_every_step(ranks: Any, name: str) -> None:
    for report in ranks(4, holding, replace(LAYOUTS[name], check_invariants=True, use_distributed_optimizer=True)):
        assert report.startswith("invariants hold: ")


def drifted(options: Options) -> str:
    state = initialize_model_parallel(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    trainer = Trainer(options, state, dataset())
    trainer.step(0)
    if state.rank == 2:
        next(trainer.chunks[0].parameters()).data.view(-1)[5] += 1e-6
    with pytest.raises(InvariantError) as error:
        trainer.step(1)
    return str(error.value)


def test_a_replica_that_drifts_is_named_on_every_rank(ranks: Any) -> None:
    everybody = ranks(4, drifted, replace(LAYOUTS["tp2-dp2"], check_invariants=True))
    assert len(set(everybody)) == 1
    assert "embedding.word_embeddings.weight" in everybody[0]
