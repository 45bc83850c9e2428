"""The demo in three precisions: bf16 and fp16 learn what float32 learns. Draws their losses in ``out/precision.svg``.

Minutes long, so only ``make soak`` runs it. What half precision needs for it, float32 sums, main parameters and a loss scale, is said
in ``minimeg/precision.py``; that each is needed, tests/test_precision.py shows in seconds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from minimeg.arguments import parse
from minimeg.data import TextDataset, load_text
from minimeg.lab.drawings.chart import line_chart
from minimeg.options import Options
from minimeg.parallel_state import initialize_model_parallel
from minimeg.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
STEPS, LAST, BOUND = 250, 10, 0.01


def demo() -> Options:
    """The model and the steps of ``make demo``, from the Makefile itself."""
    (model,) = re.findall(r"^DEMO_MODEL = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    training = f"--train-iters {STEPS} --lr 2e-3 --lr-warmup-iters 40"
    return parse(f"--tp 2 --pp 2 {model} {training}".split())


def losses(options: Options) -> list[float]:
    with initialize_model_parallel(2, 2) as state:
        trainer = Trainer(options, state, TextDataset(load_text(), options.seq_length))
        return [trainer.step(step).loss for step in range(options.train_iters)]


@pytest.mark.soak
def test_half_precision_learns_what_float32_learns(ranks) -> None:
    options = demo()
    curves = {
        dtype: ranks(4, losses, replace(options, dtype=dtype), timeout=1800)[0]
        for dtype in ("float32", "bfloat16", "float16")
    }
    final = {dtype: sum(curve[-LAST:]) / LAST for dtype, curve in curves.items()}
    spread = max(final.values()) / min(final.values()) - 1
    told = ", ".join(f"{dtype} {loss:.4f}" for dtype, loss in final.items())
    print(f"mean loss of the last {LAST} of {STEPS} steps: {told}; {spread:.2%} apart")
    sentence = f"Three curves that lie on each other: over the last {LAST} steps they are {spread:.2%} apart."
    target = ROOT / "out" / "precision.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(line_chart(curves, title="The demo in three precisions", sentence=sentence), encoding="utf-8")
    assert final["float32"] < curves["float32"][0] - 2, "it did not learn"
    assert spread <= BOUND, told
