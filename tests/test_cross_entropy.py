"""Vocabulary-parallel cross entropy: equal to torch's for any cut, stable, smoothed over the whole vocabulary, deaf to padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimeg.comm import ledger
from minimeg.cross_entropy import vocab_parallel_cross_entropy
from minimeg.data import MicroBatch
from minimeg.data_parallel import GradientReducer
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import Shard, ShardedModule
from minimeg.pipeline import run
from minimeg.schedule import one_f_one_b
from tests.rank_functions import Outside, close, strided, tensor_group

SIZES = (1, 2, 3, 4)


def on_ranks(ranks: Any, t: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if t == 1 else ranks(t, function, *args)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense(logits: Tensor, target: Tensor, alpha: float) -> Tensor:
    """torch's, whose smoothing also gives the target its share: alpha over the others is alpha K/(K - 1) over all."""
    k = logits.shape[-1]
    smoothing = alpha * k / (k - 1) if alpha else 0.0
    probability = torch.full_like(logits, smoothing / k)
    probability.scatter_add_(-1, target.unsqueeze(-1), torch.full_like(logits[..., :1], 1 - smoothing))
    loss = -(probability * logits.log_softmax(-1)).sum(-1)
    if smoothing <= 1:  # F.cross_entropy refuses more
        flat = F.cross_entropy(logits.view(-1, k), target.reshape(-1), reduction="none", label_smoothing=smoothing)
        assert torch.allclose(loss, flat.view(target.shape), rtol=1e-12, atol=1e-12)
    return loss


def padded(logits: Tensor, t: int, filling: float) -> Tensor:
    return F.pad(logits, (0, -logits.shape[-1] % t), value=filling)


# ---- equal to torch ----------------------------------------------------------------------------------------------------------


def against_torch(t: int, v: int, scale: float, alpha: float) -> int:
    g, compared = tensor_group(t), 0
    width = -(-v // t)
    whole, upstream = scale * draw(4, 3, v, seed=1), draw(4, 3, seed=2)
    target = torch.randint(v, (4, 3), generator=torch.Generator().manual_seed(3))
    target.view(-1)[:6] = torch.tensor([0, v - 1, width - 1, min(width, v - 1), v // 2, 0])
    leaf = whole.clone().requires_grad_()
    right = dense(leaf, target, alpha)
    (right_grad,) = torch.autograd.grad(right, leaf, upstream)
    right_grad = padded(right_grad, t, 0)[..., g.rank * width : (g.rank + 1) * width]
    for filling in (0.0, 1e30, -torch.inf, torch.nan) if v % t else (0.0,):
        mine = padded(whole, t, filling)[..., g.rank * width : (g.rank + 1) * width]
        for kind, logits, storage in strided(mine):
            before = storage.clone()
            logits = logits.detach().requires_grad_()
            loss = vocab_parallel_cross_entropy(logits, target, g, alpha, vocab_size=v)
            (grad,) = torch.autograd.grad(loss, logits, upstream)
            where = f"v={v} x{scale} alpha={alpha} filled with {filling}, {kind}, rank {g.rank} of {t}"
            assert close(loss.detach(), right.detach(), 1e-11 * scale), f"{where}: loss"
            assert close(grad, right_grad, 1e-12), f"{where}: gradient"
            assert storage.equal(before) or filling != filling, f"{where}: the logits changed"
            compared += 1
    if v % t == 0:
        assert torch.equal(vocab_parallel_cross_entropy(mine, target, g, alpha), loss.detach()), (
            "v is t times the width"
        )
    for one in (0, 5):  # one token, without any other dimension
        alone = vocab_parallel_cross_entropy(mine.view(-1, width)[one], target.view(-1)[one], g, alpha, vocab_size=v)
        assert close(alone, loss.detach().view(-1)[one], 1e-13 * scale)
    return compared


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("t", SIZES)
def test_equals_torch_in_float64(ranks: Any, t: int, scale: float, alpha: float) -> None:
    """Loss and gradient; v = 2 over 4 ranks leaves two of them with padding only."""
    for v in (2, 5, 12, 27):
        layouts = 5 * (4 if v % t else 1)
        assert on_ranks(ranks, t, against_torch, t, v, scale, alpha) == [layouts] * t


def low_precision(t: int, dtype: torch.dtype) -> tuple[float, float, torch.dtype, torch.dtype]:
    """Against torch in float64 on the same rounded logits: -> largest error of loss and of gradient, and their dtypes."""
    g, v = tensor_group(t), 24
    whole = (4 * draw(16, v, seed=4)).to(dtype)
    target = torch.randint(v, (16,), generator=torch.Generator().manual_seed(5))
    leaf = whole.double().requires_grad_()
    right = dense(leaf, target, 0.1)
    right.sum().backward()
    mine = whole.chunk(t, -1)[g.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, g, 0.1)
    loss.sum().backward()
    off = float((loss.detach().double() - right.detach()).abs().max())
    return off, float((mine.grad.double() - leaf.grad.chunk(t, -1)[g.rank]).abs().max()), loss.dtype, mine.grad.dtype


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
@pytest.mark.parametrize("t", [1, 4])
def test_half_precision_is_computed_in_float32(ranks: Any, t: int, dtype: torch.dtype, bound: float) -> None:
    for loss, grad, loss_dtype, grad_dtype in on_ranks(ranks, t, low_precision, t, dtype):
        assert (loss_dtype, grad_dtype) == (torch.float32, dtype)
        assert loss <= 2e-6
        assert grad <= bound  # in half precision half a unit in the last place, for a gradient below 1


# ---- specimens ---------------------------------------------------------------------------------------------------------------


def one_logit_a_rank(t: int, shift: float, alpha: float) -> tuple[list[float], list[list[float]]]:
    """Logits ln 1, ln 2, ln 3, ln 4, over t ranks: the losses of targets 0..3, and the gradient of target 3."""
    g = tensor_group(t)
    logits = (torch.arange(1, 5, dtype=torch.float64).log() + shift).chunk(t)[g.rank].expand(4, 4 // t)
    logits = logits.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, torch.arange(4), g, alpha)
    losses[3].backward()
    assert not logits.grad[:3].any()
    return losses.tolist(), logits.grad[3].tolist()


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("shift", [0, 1000])
def test_specimen(ranks: Any, t: int, shift: float) -> None:
    """The sum of exp is 10, so target 3 costs ln(10/4). Adding 1000 to every logit changes nothing."""
    seen = on_ranks(ranks, t, one_logit_a_rank, t, shift, 0.0)
    for losses, _ in seen:
        assert losses == pytest.approx([2.302585093, 1.609437912, 1.203972804, 0.916290732], abs=1e-9)
    assert [x for _, part in seen for x in part] == pytest.approx([0.1, 0.2, 0.3, -0.6], abs=1e-12)
    smoothed = on_ranks(ranks, t, one_logit_a_rank, t, shift, 0.3)
    right = (1 - 0.3) * math.log(10 / 4) + 0.1 * sum(math.log(10 / k) for k in (1, 2, 3))
    for losses, _ in smoothed:  # alpha = 0.3 over the 3 other classes: 1.1530, on every rank
        assert losses[3] == pytest.approx(right, abs=1e-12)
        assert round(losses[3], 4) == 1.1530
    assert [x for _, part in smoothed for x in part] == pytest.approx([0.0, 0.1, 0.2, -0.3], abs=1e-12)


def zero_logits(t: int) -> tuple[float, list[float]]:
    g = tensor_group(t)
    logits = torch.zeros(-(-5 // t), dtype=torch.float64, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor(4), g, vocab_size=5)
    loss.backward()
    return loss.item(), logits.grad.tolist()


@pytest.mark.parametrize(("t", "wrong"), [(1, None), (2, 6), (4, 8)])
def test_padding_does_not_vote(ranks: Any, t: int, wrong: int | None) -> None:
    """CASE 11: v = 5 and zero logits give ln 5 = 1.6094 at every t, not ln 6 or ln 8 = 2.0794."""
    seen = on_ranks(ranks, t, zero_logits, t)
    for loss, _ in seen:
        assert loss == pytest.approx(math.log(5), abs=1e-14)
        assert wrong is None or abs(loss - math.log(wrong)) > 0.1
    gradient = [x for _, part in seen for x in part]
    assert gradient == pytest.approx([0.2] * 4 + [-0.8] + [0] * (-5 % t), abs=1e-15)
    assert gradient[5:] == [0] * (-5 % t)


# ---- what is said, and what is refused -----------------------------------------------------------------------------------------


def traffic(t: int, alpha: float) -> dict[str, Any]:
    g = tensor_group(t)
    logits = torch.zeros(6, 2, 8 // t, requires_grad=True)
    with Outside() as outside, ledger() as book:
        loss = vocab_parallel_cross_entropy(logits, torch.zeros(6, 2, dtype=torch.int64), g, alpha)
        forward = list(outside.communication)
        loss.sum().backward()
    return {
        "forward": forward,
        "all": outside.communication,
        "ledger": [(record.op, record.payload) for record in book.records],
        "wire": book.total(),
    }


@pytest.mark.parametrize("t", SIZES[1::2])
def test_three_numbers_a_token_travel(ranks: Any, t: int) -> None:
    """MAX; then the sums of exp and of the target's logit together. Backward needs nobody."""
    for alpha, sums in ((0.0, 2), (0.1, 3)):
        for seen in ranks(t, traffic, t, alpha):
            expected = [("all_reduce", 12 * 4), ("all_reduce", sums * 12 * 4)]
            assert seen["forward"] == seen["all"] == seen["ledger"] == expected
            assert seen["wire"] == 2 * (t - 1) / t * (1 + sums) * 12 * 4
            if (t, alpha) == (4, 0.0):
                assert seen["wire"] / 12 == 18  # bytes a token


def refusals(t: int) -> None:
    g = tensor_group(t)
    logits, target = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    v = 4 * t
    with ledger() as book:
        for bad in (-1, v, -100):
            with pytest.raises(IndexError, match=rf"target {bad} is outside the vocabulary 0\.\.{v - 1}"):
                vocab_parallel_cross_entropy(logits, torch.tensor([0, bad, v - 1]), g)
        if t > 1:  # a column that is padding
            with pytest.raises(IndexError, match=rf"target {v - 1} is outside the vocabulary 0\.\.{v - 2}"):
                vocab_parallel_cross_entropy(logits, torch.tensor([0, v - 1, 0]), g, vocab_size=v - 1)
        for size in (v + 1, v - t, 0, -3):
            with pytest.raises(ValueError, match=rf"logits have 4 columns .* vocab_size={size} over {t} ranks"):
                vocab_parallel_cross_entropy(logits, target, g, vocab_size=size)
        for shape in ((4,), (3, 1), ()):
            with pytest.raises(ValueError, match=r"target of shape .* does not fit logits of shape \[3, 4\]"):
                vocab_parallel_cross_entropy(logits, torch.zeros(shape, dtype=torch.int64), g)
        for alpha in (-0.1, 1.0, 1.5, math.nan):
            with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\)"):
                vocab_parallel_cross_entropy(logits, target, g, alpha)
        with pytest.raises(ValueError, match="the vocabulary has 1; use 0"):
            vocab_parallel_cross_entropy(torch.zeros(3, 1), target, g, 0.1, vocab_size=1)
    assert book.records == [], "refused before anything is said"
    assert not vocab_parallel_cross_entropy(torch.zeros(3, 1), target, g, vocab_size=1).any()
    assert vocab_parallel_cross_entropy(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), g).shape == (0,)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_refusals(ranks: Any, t: int) -> None:
    """A target outside the vocabulary is an IndexError at every t."""
    on_ranks(ranks, t, refusals, t)


def test_a_second_derivative_is_refused() -> None:
    """What backward keeps is a number, not a function of the logits: a second derivative would lack terms."""
    logits = draw(3, 4, seed=6).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 2]), single_process().tp)
    (grad,) = torch.autograd.grad((loss**2).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_logits_are_not_used_up() -> None:
    logits = draw(3, 4, seed=7).requires_grad_()
    target = torch.tensor([0, 1, 2])
    loss = vocab_parallel_cross_entropy(logits, target, single_process().tp, 0.1)
    first = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    second = torch.autograd.grad(loss.sum(), logits)
    assert torch.equal(first[0], second[0]), "backward may run again"


# ---- CASE 35: one mean over all tokens -----------------------------------------------------------------------------------------


class Tokens(ShardedModule):
    """The loss of a token is w times a number that the micro-batch brings along, with w = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.add_parameter("weight", Shard("weight", (1,)))
        with torch.no_grad():
            self.weight.fill_(1)

    def forward(self, x: Tensor | None, microbatch: MicroBatch) -> Tensor:
        return self.weight * microbatch.targets

    def loss(self, losses: Tensor, microbatch: MicroBatch) -> Tensor:
        return torch.where(microbatch.valid, losses, 0).sum()


def mean_over_tokens(dp: int, losses: list[list[float]]) -> tuple[float, float]:
    """-> loss and gradient of w, for the token losses of all micro-batches; NaN stands for a token that does not count."""
    state = initialize_model_parallel() if dp > 1 else single_process()
    everything = [torch.tensor([row], dtype=torch.float64) for row in losses]
    share = len(everything) // dp
    microbatches = []
    for index, x in enumerate(everything):
        valid = ~x.isnan()
        microbatches.append(MicroBatch(torch.zeros_like(x).long(), torch.where(valid, x, 7.0), valid, index, 0))
    mine = microbatches[state.dp.rank * share : (state.dp.rank + 1) * share]
    count = state.dp_cp.all_reduce(torch.tensor(sum(mb.valid_tokens for mb in mine))).item()
    model = Tokens().double()
    reducer = GradientReducer([model], state)
    result = run(
        one_f_one_b(1, share), [model], mine, group=state.pp, loss=model.loss, normaliser=int(count),
        on_gradients_ready=reducer.ready,
    )  # fmt: skip
    reducer.finish()
    return state.dp_cp.all_reduce(result.loss).item(), model.weight.grad.item()


NONE = math.nan


@pytest.mark.parametrize(
    ("dp", "losses", "right"),
    [
        (1, [[4, NONE, NONE], [0, 0, 0]], 1.0),  # a mean of means would be 2
        (2, [[4, NONE, NONE], [0, 0, 0]], 1.0),
        (2, [[4, NONE], [0, NONE], [0, NONE], [0, NONE]], 1.0),
        (2, [[4, NONE], [NONE, NONE], [0, 0], [NONE, 0]], 1.0),  # a micro-batch without any token
        (1, [[NONE, NONE], [3, 5]], 4.0),
    ],
)
def test_every_token_of_the_global_batch_counts_once(
    ranks: Any, dp: int, losses: list[list[float]], right: float
) -> None:
    """CASE 35: one token of loss 4 and three of loss 0 have mean 1, however they are spread over micro-batches and ranks."""
    assert on_ranks(ranks, dp, mean_over_tokens, dp, losses) == [(right, right)] * dp
