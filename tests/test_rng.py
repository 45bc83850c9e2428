"""Random streams by key: who draws alike, who does not, and that nothing else has a part in it."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg import rng
from minimeg.data import MicroBatch
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import initialise
from minimeg.rng import Key, dropout, dropout_mask
from tests.rank_functions import close, tensor_group

CPU = torch.device("cpu")
SHAPE = torch.Size([100, 4, 28])  # 11,200 elements


def mask(key: Key, p: float = 0.5, shape: torch.Size = SHAPE) -> Tensor:
    return dropout_mask(shape, p, key, CPU, group=None, dim=0, whole=False)


def differ(a: Tensor, b: Tensor) -> bool:
    """Independent masks at p = 0.5 agree on half of their places."""
    return a.shape == b.shape and abs(float((a == b).double().mean()) - 0.5) < 0.03


# ---- keys ----------------------------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_its_key_alone() -> None:
    key = Key(7, step=3, microbatch=2, layer=1, call=1)
    first = mask(key)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    mask(Key(8))
    torch.rand(5, generator=key.generator())
    assert torch.equal(mask(key), first)
    assert torch.equal(torch.get_rng_state(), state), "the default generator is left alone"


def test_every_field_of_a_key_matters() -> None:
    base = Key(1, stream="dropout", step=1, microbatch=1, layer=1, call=1, tp=1)
    others = [base.at(**{f.name: "other" if f.name == "stream" else 2}) for f in fields(Key)]
    # Digits must not run together: layer 1 call 11 is not layer 11 call 1.
    others += [
        base.at(layer=1, call=11),
        base.at(layer=11, call=1),
        base.at(step=11),
        base.at(seed=-1),
        base.at(seed=2**70),
    ]
    masks = [mask(key) for key in (base, *others)]
    for a, b in combinations(masks, 2):
        assert differ(a, b)
    assert base.at() == base
    assert replace(base, call=2) == base.at(call=2)


def test_keys_meet_no_other_key() -> None:
    """16,384 keys of a long run: their first draws are all different."""
    drawn = {
        int(torch.randint(2**62, (), generator=Key(1234, step=step, microbatch=mb, layer=layer, call=call).generator()))
        for step in range(32) for mb in range(16) for layer in range(8) for call in range(4)
    }  # fmt: skip
    assert len(drawn) == 32 * 16 * 8 * 4


# ---- dropout -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_zeroes_and_scales(p: float, dtype: torch.dtype) -> None:
    x = (torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) + 1).to(dtype).requires_grad_()
    y = dropout(x, p, Key(3))
    kept = mask(Key(3), p)
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.03
    assert y.dtype == dtype
    assert not y[~kept].any()
    assert torch.equal(y[kept], x[kept] * (1 / (1 - p)))
    y.sum().backward()
    assert torch.equal(x.grad, kept.to(dtype) * (1 / (1 - p)))
    assert abs(float(y.detach().double().mean() / x.detach().double().mean()) - 1) < 0.1


def test_dropout_keeps_one_byte_an_element_for_backward() -> None:
    kept: list[Tensor] = []
    x = torch.ones(SHAPE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        dropout(x, 0.5, Key(1))
    assert [(y.dtype, y.numel()) for y in kept if y.numel() > 1] == [(torch.bool, x.numel())]


def test_no_dropout_is_no_operation() -> None:
    x = torch.ones(3)
    assert dropout(x, 0.0, Key(1)) is x
    assert dropout(x, 0.5, None) is x, "evaluation"
    for p in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"dropout probability must lie in \[0, 1\)"):
            dropout(x, p, Key(1))


# ---- CASE 22: which ranks share a mask -------------------------------------------------------------------------------------------


def masks_here(t: int) -> dict[str, Tensor]:
    """This rank's masks of 10,000 elements and more, of replicated and of cut tensors."""
    g = tensor_group(t)
    key = Key(5, microbatch=1)
    found = {"replicated": mask(key)}
    for dim in (0, -1, 1):
        shape = list(SHAPE)
        shape[dim] //= t
        for whole in (False, True):
            found[f"cut {dim} {whole}"] = dropout_mask(torch.Size(shape), 0.5, key, CPU, group=g, dim=dim, whole=whole)
    return found


def test_masks_over_a_tensor_parallel_group(ranks: Any) -> None:
    """Replicated tensors: one mask at every t. Cut ones: another on every rank, or slices of one whole mask."""
    alone = masks_here(1)
    for t in (2, 4):
        seen = ranks(t, masks_here, t)
        for one in seen:
            assert torch.equal(one["replicated"], alone["replicated"])
        for dim in (0, -1, 1):
            for a, b in combinations([one[f"cut {dim} False"] for one in seen], 2):
                assert differ(a, b)
            whole = torch.cat([one[f"cut {dim} True"] for one in seen], dim)
            assert torch.equal(whole, alone[f"cut {dim} True"])
            assert torch.equal(whole, mask(Key(5, microbatch=1)))
            assert all(one[f"cut {dim} True"].is_contiguous() for one in seen)


CONFIG = GPTConfig(
    2, 32, 4, 27, 32, hidden_dropout=0.5, attention_dropout=0.5, init_std=0.3
)  # residuals of 32 x 4 x 32 elements, probabilities of 4 x 4 x 32 x 32


def record_masks(tp: int, sp: bool, whole: bool, pp: int = 1) -> dict[str, Any]:
    """Run a GPT forward and note every mask it draws, by layer and call; and its logits."""
    state = initialize_model_parallel(tp, pp) if tp * pp > 1 else single_process()
    config = replace(CONFIG, sequence_parallel=sp, whole_dropout_masks=whole)
    model = GPT(config, state.tp, state.pp.rank, pp).double()
    initialise(model, seed=1)
    tokens = torch.randint(27, (4, 32), generator=torch.Generator().manual_seed(2))
    batch = MicroBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), index=state.dp.rank, step=4)
    masks: dict[tuple[int, int], Tensor] = {}
    original = rng.dropout_mask

    def spy(shape: torch.Size, p: float, key: Key, *args: Any, **more: Any) -> Tensor:
        assert (key.layer, key.call) not in masks, "one key, one draw"
        masks[key.layer, key.call] = original(shape, p, key, *args, **more)
        return masks[key.layer, key.call]

    rng.dropout_mask = spy
    try:
        s = 32 // tp if sp else 32
        x = None if state.pp.rank == 0 else torch.ones(s, 4, 32, dtype=torch.float64)
        out = model(x, batch)
    finally:
        rng.dropout_mask = original
    logits = state.tp.all_gather(out.detach(), -1)[..., :27] if state.pp.rank == pp - 1 else None
    return {"masks": masks, "logits": logits}


ATTENTION = [(0, 0), (1, 0)]
RESIDUAL = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 0)]  # (2, 0): after the embedding


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
def test_masks_of_a_gpt_over_tp_and_dp(ranks: Any, sp: bool) -> None:
    """CASE 22 at tp = 2, dp = 2 (ranks 0 1 | 2 3): equal pairs are exactly equal, different ones agree on half."""
    zero, one, two, three = (seen["masks"] for seen in ranks(4, record_masks, 2, sp, False))
    alone = record_masks(1, False, False)["masks"]
    assert sorted(zero) == sorted(alone) == sorted([*ATTENTION, *RESIDUAL])
    for name in ATTENTION:  # heads are cut over tp
        assert zero[name].shape == (4, 2, 32, 32)
        assert differ(zero[name], one[name])
    for name in RESIDUAL:
        assert zero[name].shape == ((16, 4, 32) if sp else (32, 4, 32))
        if sp:  # each rank has other tokens
            assert differ(zero[name], one[name])
        else:  # each rank has a copy of one tensor, as one process has it
            assert torch.equal(zero[name], one[name])
            assert torch.equal(zero[name], alone[name])
    for name in zero:  # other samples
        assert differ(zero[name], two[name])
        assert differ(one[name], three[name])
    for names in (ATTENTION, RESIDUAL):  # other layers and calls
        for a, b in combinations(names, 2):
            assert differ(zero[a], zero[b])


def test_masks_do_not_know_the_pipeline(ranks: Any) -> None:
    """CASE 22: stages differ, since their layers do; layer 1 draws the same on stage 1 as in one process."""
    alone = record_masks(1, False, False)["masks"]
    stages = [seen["masks"] for seen in ranks(2, record_masks, 1, False, False, 2)]
    assert sorted([*stages[0], *stages[1]]) == sorted(alone)
    for stage in stages:
        for name, drawn in stage.items():
            assert torch.equal(drawn, alone[name])


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
def test_whole_masks_make_every_t_equal(ranks: Any, sp: bool) -> None:
    """With whole masks, attention dropout and sequence parallelism included: slices of one mask, and the same logits."""
    alone = record_masks(1, False, True)
    assert torch.equal(alone["logits"], record_masks(1, False, False)["logits"]), "in one process all masks are whole"
    for tp in (2, 4):
        seen = ranks(4, record_masks, tp, sp, True)[:tp]  # the first data-parallel rank: micro-batch 0
        for name in ATTENTION:
            assert torch.equal(torch.cat([one["masks"][name] for one in seen], 1), alone["masks"][name])
        for name in RESIDUAL:
            drawn = [one["masks"][name] for one in seen]
            assert (
                torch.equal(torch.cat(drawn), alone["masks"][name])
                if sp
                else torch.equal(drawn[0], alone["masks"][name])
            )
        for one in seen:
            assert close(one["logits"], alone["logits"], 1e-10)


def test_evaluation_draws_nothing() -> None:
    model = GPT(CONFIG, single_process().tp).eval()
    initialise(model, 1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), 0, 0)
    assert torch.equal(model(None, batch), model(None, replace(batch, step=1)))
    model.train()
    assert not torch.equal(model(None, batch), model(None, replace(batch, step=1)))
    assert torch.equal(model(None, batch), model(None, batch)), "the same key, the same masks"
