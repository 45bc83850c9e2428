"""Is it equal to one process? The same steps once more, in one process, compared by loss and by parameter.

A run over many ranks is right if and only if nobody could tell. Rank 0 builds the model again, whole, in groups of one rank, reads the
same micro-batches in the same order (those of all data-parallel ranks, one after the other), and takes the same number of steps.

    float64     losses and parameters within 1e-9
    float32     losses within 1e-4 relative; parameters are printed, worst by name
    bfloat16    losses within 1e-2 relative

Why parameters do not decide in single precision: the gradient of a *key bias* is exactly 0 (softmax does not notice a shift of all
scores), so what arrives is rounding noise, and AdamW divides it by its own size: two runs that agree in everything else move such a
bias by a whole learning rate in different directions. In float64 the epsilon of AdamW hides the noise.

See it run: ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2 --compare-with-single-process``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from tqdm import tqdm

from minimeg.data import TextDataset
from minimeg.options import Options
from minimeg.parallel_state import single_process
from minimeg.parameter import full_state
from minimeg.trainer import Trainer

# dtype: (bound of the loss, is it relative, bound of the parameters or None)
BOUNDS = {
    "float64": (1e-9, False, 1e-9),
    "float32": (1e-4, True, None),
    "bfloat16": (1e-2, True, None),
    "float16": (1e-2, True, None),
}


@dataclass(frozen=True)
class Verdict:
    """Outcome of a comparison. ``losses`` are those of the single process."""

    passed: bool
    text: str
    losses: tuple[float, ...]


def compare_with_single_process(
    options: Options, dataset: TextDataset, losses: Sequence[float], parameters: dict[str, Tensor], device: str
) -> Verdict:
    """Repeat the run in this process alone and compare. ``parameters``: the full state of the parallel run at its end.

    Not collective: one rank calls it, the others may be gone.
    """
    trainer = Trainer(options.in_one_process(), single_process(device), dataset)
    steps = tqdm(range(len(losses)), "one process", disable=not sys.stderr.isatty(), leave=False)
    twin_losses = [trainer.step(step).loss for step in steps]
    twin = full_state(trainer.chunks, trainer.state)
    return _judge(options.dtype, losses, twin_losses, parameters, twin)


def _judge(
    dtype: str, losses: Sequence[float], twin_losses: Sequence[float], mine: dict[str, Tensor], twin: dict[str, Tensor]
) -> Verdict:
    bound, relative, parameter_bound = BOUNDS[dtype]
    gaps = [abs(a - b) / (abs(b) if relative else 1.0) for a, b in zip(losses, twin_losses, strict=True)]
    gap = max((g if g == g else float("inf") for g in gaps), default=0.0)  # NaN is never close
    lines = [
        f"compared with one process, {len(losses)} steps in {dtype}:",
        f"  loss        largest {'relative ' if relative else ''}difference {gap:.1e}, bound {bound:.0e}"
        f"  (step {gaps.index(max(gaps)) if gaps else 0})",
    ]
    if mine.keys() != twin.keys():
        return Verdict(
            False, f"FAIL: the runs hold different parameters: {sorted(mine.keys() ^ twin.keys())}", tuple(twin_losses)
        )
    worst = sorted(((float((mine[name] - twin[name]).abs().max()), name) for name in mine), reverse=True)
    lines += [f"  parameters  largest difference {difference:.1e} in {name}" for difference, name in worst[:3]]
    if parameter_bound is None:
        lines.append(
            "  (shown, not judged: a key bias has gradient 0, and AdamW amplifies its rounding to a whole step)"
        )
    passed = gap <= bound and (parameter_bound is None or worst[0][0] <= parameter_bound)
    return Verdict(passed, "\n".join(["PASS" if passed else "FAIL", *lines]), tuple(twin_losses))
