"""What full recomputation costs: against the 1/3 that counting FLOPs predicts, and against torch's own checkpoint, in one run.

    python -m tests.benchmarks.recompute

Four layers of width 256 without a pipeline, one thread. All contenders take turns within each round, in another order each time; a
ratio is formed within a round, and the median over the rounds counts. It is the processor's time that is taken, so that other work
on the machine disturbs less. Gradients are compared in the same run: equal to the bit.

FLOPs say that a forward is a third of a step. Its share of the time is larger: masks are drawn there, softmax, GELU and norms
computed, which count as nothing. So the share that was measured is printed beside the ratio: what one more forward has to cost here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.models.recomputation import NOTHING
from minimeg.parallel_state import single_process
from minimeg.parameter import initialise
from minimeg.recompute import checkpoint
from minimeg.recompute_classic import classic_checkpoint
from minimeg.rng import Key

S, B, H, LAYERS = 128, 2, 256, 4

Run = Callable[..., Tensor]


def plain(function: Run, x: Tensor) -> Tensor:
    return function(x)


CONTENDERS: dict[str, Run] = {
    "none": plain,
    "minimeg": checkpoint,
    "torch, non-reentrant": partial(torch_checkpoint, use_reentrant=False),
    "classic Function": classic_checkpoint,
}


def step(model: GPT, x: Tensor, how: Run) -> tuple[list[Tensor], float]:
    """One forward and backward through the layers; their gradients, and seconds of processor time of the forward."""
    start = time.process_time()
    model.zero_grad()
    x.grad = None
    out = x
    key = Key(7)
    for layer in model.layers.values():
        out = how(lambda y, layer=layer: layer(y, model.causal_bias, key, NOTHING), out)
    loss = out.square().sum()
    forward = time.process_time() - start
    loss.backward()
    return [x.grad, *(p.grad for p in model.layers.parameters())], forward


def measure(rounds: int = 11, dropout: float = 0.1) -> dict[str, list[float]]:
    """Seconds of processor time of each contender in each round; "forward": of the one that recomputes nothing."""
    config = GPTConfig(LAYERS, H, 8, 256, S, hidden_dropout=dropout, attention_dropout=dropout)
    model = GPT(config, single_process().tp)
    initialise(model, 1)
    x = nn.Parameter(torch.randn(S, B, H, generator=torch.Generator().manual_seed(0))).detach().requires_grad_()
    expected = [grad.clone() for grad in step(model, x, plain)[0]]
    seconds: dict[str, list[float]] = {name: [] for name in (*CONTENDERS, "forward")}
    for number in range(rounds + 2):
        names = list(CONTENDERS)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names[:: -1 if number % 2 else 1]:
            start = time.process_time()
            grads, forward = step(model, x, CONTENDERS[name])
            spent = time.process_time() - start
            assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), f"{name}: other gradients"
            if number >= 2:  # the first two are for warming up
                seconds[name].append(spent)
                seconds["forward"] += [forward] if name == "none" else []
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Median and quartiles of the ratio within a round."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def main() -> None:
    torch.set_num_threads(1)
    for dropout in (0.1, 0.0):
        seconds = measure(dropout=dropout)
        print(f"L={LAYERS} h={H} s={S} b={B}, float32, one thread, dropout {dropout}; gradients equal to the bit")
        for name in CONTENDERS:
            middle, low, high = ratio(seconds, name, "none")
            milliseconds = 1e3 * statistics.median(seconds[name])
            print(f"    {name:<22} {milliseconds:7.1f} ms   {middle:.3f} x none  [{low:.3f} .. {high:.3f}]")
        share = ratio(seconds, "forward", "none")[0]
        print(f"    one more forward: FLOPs say 1.333, its share of the time says {1 + share:.3f}")
        for other in ("torch, non-reentrant", "classic Function"):
            middle, low, high = ratio(seconds, "minimeg", other)
            print(f"    minimeg / {other:<22} {middle:.3f}  [{low:.3f} .. {high:.3f}]")


if __name__ == "__main__":
    main()
