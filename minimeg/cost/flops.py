"""How much arithmetic is an iteration, and which part of it counts as useful?

A product of matrices [m, k] and [k, n] is 2mkn FLOPs. A layer's forward pass multiplies with 12h^2 weights per token (24 b s h^2) and
forms the attention core, scores and weighted values (4 b s^2 h: all s^2 pairs, also those that the causal mask hides). The backward
pass is two such products for each, so three passes in all; recomputation runs a part of the forward pass again:

                      passes over a layer       over the attention core     over the output layer (2 b s h v)
    none              3                         3                           3      "model FLOPs"
    selective         3                         4                           3
    full              4                         4                           3

Sources: Narayanan et al. 2021, arXiv 2104.04473, equation 3 and appendix; Korthikanti et al. 2022, arXiv 2205.05198, equations 7 to 9.

See it run: ``python -m minimeg.cost --model gpt3-175b``.
"""

from __future__ import annotations

from typing import Literal, get_args

from minimeg.cost.shapes import GPTShape
from minimeg.schedule.actions import refuse, size_faults

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


def attention_core_flops(shape: GPTShape, batch: int) -> int:
    """4 b s^2 h: forward pass of Q K^T and of the product with V in one layer. Narayanan et al. 2021, appendix.

    All s^2 pairs: not halved for the causal mask.
    """
    return 4 * batch * shape.sequence**2 * shape.hidden


def layer_forward_flops(shape: GPTShape, batch: int) -> int:
    """24 b s h^2 + 4 b s^2 h: forward pass of one layer. Narayanan et al. 2021, appendix. ``batch`` in sequences."""
    return 24 * batch * shape.sequence * shape.hidden**2 + attention_core_flops(shape, batch)


def output_forward_flops(shape: GPTShape, batch: int) -> int:
    """2 b s h v: forward pass of the output layer. Narayanan et al. 2021, appendix."""
    return 2 * batch * shape.sequence * shape.hidden * shape.vocabulary


def flops_per_iteration(shape: GPTShape, batch: int) -> int:
    """F = 96 B s L h^2 (1 + s/(6h) + v/(16 L h)). Narayanan et al. 2021, equation 3, for a global batch of B sequences.

    This counts FULL recomputation: four passes over the layers, three over the output layer. Hence the 16 in its last term, where
    ``model_flops_per_iteration`` has 12.
    """
    return hardware_flops_per_iteration(shape, batch, "full")


def model_flops_per_iteration(shape: GPTShape, batch: int) -> int:
    """72 B L s h^2 (1 + s/(6h) + v/(12 h L)). Korthikanti et al. 2022, equation 7: three passes, what any implementation has to do."""
    return hardware_flops_per_iteration(shape, batch, "none")


def hardware_flops_per_iteration(shape: GPTShape, batch: int, recompute: Recompute) -> int:
    """FLOPs that are executed, counted pass by pass as in the table above this module.

    none: equation 7 of Korthikanti et al. 2022. full: equation 3 of Narayanan et al. 2021. selective: 72 B L s h^2 (1 + 2s/(9h) +
    v/(12 h L)), which is what the TEXT of Korthikanti et al. describes (the core once more); for its equation 8 see
    ``hardware_flops_as_published``.

    Raises:
        ValueError: batch below 1, an unknown ``recompute``.
    """
    faults = size_faults(batch=batch)
    if recompute not in RECOMPUTE:
        faults.append(f"recompute={recompute!r} is unknown; use one of {', '.join(RECOMPUTE)}")
    refuse(faults, "cannot count FLOPs")
    layer, core = layer_forward_flops(shape, batch), attention_core_flops(shape, batch)
    again = {"none": 0, "selective": core, "full": layer}[recompute]
    return shape.layers * (3 * layer + again) + 3 * output_forward_flops(shape, batch)


def hardware_flops_as_published(shape: GPTShape, batch: int) -> int:
    """72 B L s h^2 (1 + s/(3h) + v/(12 h L)). Korthikanti et al. 2022, equation 8 (arXiv v1): selective recomputation, AS PRINTED.

    The paper is inconsistent with itself here. Its text recomputes the core once, 4 B s^2 h a layer; the printed term counts three
    times that. Table 5's column of hardware utilisation and the "2.7 % and 1.6 %" of overhead come from this equation, so it is
    kept to reproduce them; ``hardware_flops_per_iteration(shape, batch, "selective")`` is the count (Table 5 would read 42.4, 51.9,
    56.4, 56.5).
    """
    core = attention_core_flops(shape, batch)
    return model_flops_per_iteration(shape, batch) + 3 * shape.layers * core


def attention_core_share(shape: GPTShape) -> float:
    """4 b s^2 h / (24 b s h^2 + 4 b s^2 h): the core's part of a layer's forward pass; 1/7 at s = h."""
    return attention_core_flops(shape, 1) / layer_forward_flops(shape, 1)


def recompute_overhead(shape: GPTShape, recompute: Recompute) -> float:
    """Extra FLOPs of a layer over its 3 passes: full 1/3, selective (core's share)/3: 1/21 at s = h, 0.9 % for GPT-3.

    For selective that is s/(18h + 3s), about s/(18h); the printed approximation, s/(6h) (Korthikanti et al. 2022, equation 9), is
    three times too big, see ``hardware_flops_as_published``.
    """
    return {"none": 0.0, "selective": attention_core_share(shape) / 3, "full": 1 / 3}[recompute]


def utilisation(flops: float, seconds: float, gpus: int, peak: float) -> float:
    """flops / (seconds x gpus x peak), peak in FLOP/s of one GPU. Korthikanti et al. 2022, section 6.3.

    Model FLOPs give MFU, executed FLOPs give HFU. Narayanan et al. 2021, Table 1, prints the latter ("percentage of peak").
    """
    return flops / (seconds * gpus * peak)
