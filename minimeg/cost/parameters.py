"""How many parameters does a GPT have, and how many of them does one rank hold?

Narayanan et al. 2021 (arXiv 2104.04473), equation 2. Per layer: q, k, v (3h^2 + 3h), the attention's output (h^2 + h), the MLP (8h^2 +
5h) and two norms (4h), in all 12h^2 + 13h; the embeddings add (v + s)h.

See it run: ``python -m minimeg.cost --model gpt3-175b``; ``notebooks/00_start_here.ipynb`` names the surplus of four ranks over one.
"""

from __future__ import annotations

from minimeg.cost.shapes import GPTShape
from minimeg.schedule.actions import refuse, size_faults


def layer_parameters(shape: GPTShape) -> int:
    """12h^2 + 13h: one transformer layer. Narayanan et al. 2021, the terms of equation 2 that are multiplied by L."""
    return 12 * shape.hidden**2 + 13 * shape.hidden


def parameters(shape: GPTShape, final_norm: bool = False) -> int:
    """P = 12 L h^2 (1 + 13/(12h) + (v + s)/(12 L h)). Narayanan et al. 2021, equation 2, as the exact whole number.

    Assumes biases, LayerNorm, learned positions, and an output layer tied to the embedding. The norm after the last layer (2h) is not
    in the equation, though it is in every real GPT: ``final_norm=True`` counts it.

    Where the paper differs from itself: "15 billion" (3 layers, h=20480; section 5.3.1), "121 billion" (24 layers) and "161 billion"
    (32 layers; 5.4.1) are 12 L h^2 alone, see ``matrix_parameters``. The equation gives 16.2, 121.9 and 162.2, the last of which is
    what the caption of its Figure 13 says.

    >>> round(parameters(GPTShape(layers=128, hidden=25600, heads=160)) / 1e9)
    1008
    """
    embeddings = (shape.vocabulary + shape.sequence) * shape.hidden
    return shape.layers * layer_parameters(shape) + embeddings + (2 * shape.hidden if final_norm else 0)


def matrix_parameters(shape: GPTShape) -> int:
    """12 L h^2: the weight matrices of the layers alone, as in some prose of Narayanan et al. 2021 (see ``parameters``)."""
    return 12 * shape.layers * shape.hidden**2


def rank_parameters(shape: GPTShape, tensor: int, pipeline: int, stage: int) -> int:
    """Parameters that one rank holds, a tied copy of the embedding on the last stage included. Shoeybi et al. 2019, section 3, counted.

    Of a layer, 12h^2/t and the biases of the column-parallel linears, 7h/t, are split over t ranks; norms (4h) and the biases of the
    row-parallel linears (2h) are on all of them. The first stage holds v/t rows of the embedding, v rounded up, and all positions;
    the last the final norm and, if p > 1, its own copy of the v/t rows.

    Args:
        tensor: t. pipeline: p, which must divide L. stage: 0 is the first.

    Raises:
        ValueError: t does not divide hidden and heads, p does not divide layers, or there is no such stage.
    """
    refuse(_faults(shape, tensor, pipeline, stage), "cannot split the parameters")
    h = shape.hidden
    layer = 12 * h * h // tensor + 7 * h // tensor + 6 * h
    rows = -(-shape.vocabulary // tensor) * h
    held = shape.layers // pipeline * layer
    if stage == 0:
        held += rows + shape.sequence * h
    if stage == pipeline - 1:
        held += 2 * h + (rows if pipeline > 1 else 0)
    return held


def split_faults(shape: GPTShape, tensor: int) -> list[str]:
    """Why t tensor-parallel ranks cannot share this model; an empty list if they can."""
    return size_faults(tensor=tensor) or [
        f"tensor={tensor} does not divide {name}={size}; use a divisor of both hidden and heads, such as 1"
        for name, size in (("hidden", shape.hidden), ("heads", shape.heads))
        if size % tensor
    ]


def _faults(shape: GPTShape, tensor: int, pipeline: int, stage: int) -> list[str]:
    faults = split_faults(shape, tensor) + size_faults(pipeline=pipeline)
    if not faults and shape.layers % pipeline:
        faults.append(f"pipeline={pipeline} does not divide layers={shape.layers}; use a divisor, such as 1")
    if not 0 <= stage < max(1, pipeline):
        faults.append(f"stage={stage} must be from 0 to {max(1, pipeline) - 1}")
    return faults
