"""Curves that a training run leaves behind, with matplotlib. Colours are those of the course (Okabe & Ito: colour-blind safe)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def loss_curve(
    path: Path,
    losses: Sequence[float],
    validation: Mapping[int, float],
    twin: Sequence[float] = (),
    title: str = "training",
) -> None:
    """Loss over steps as PNG: the run as a thick line, its single-process twin as a thin dashed one on top, validation as dots.

    Equal runs look like one line. Units: nats a byte.
    """
    from matplotlib.figure import Figure  # here: training without a plot should not pay for it

    figure = Figure(figsize=(7.6, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#0072B2", linewidth=3.5, alpha=0.55, label="this run")
    if twin:
        axes.plot(
            steps, twin, color="#222222", linewidth=1, linestyle=(0, (4, 3)), label="the same steps in one process"
        )
    if validation:
        axes.plot(list(validation), list(validation.values()), "o", color="#D55E00", markersize=6, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
