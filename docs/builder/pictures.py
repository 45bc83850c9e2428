"""The pictures of the rooms, drawn by the package's own functions when the site is built."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape
from pathlib import Path
from re import DOTALL, search

from minimeg.cost import GPUS, Job, heat_map, model, plan, wire_factor, zero_bytes
from minimeg.cost.activations import in_flight
from minimeg.cost.parameters import rank_parameters
from minimeg.grid import Grid
from minimeg.lab.drawings.bars import bars
from minimeg.lab.drawings.chart import line_chart
from minimeg.lab.drawings.cross_entropy import cross_entropy
from minimeg.lab.drawings.mappings import f_and_g
from minimeg.lab.drawings.masks import shared_masks
from minimeg.lab.drawings.ribbon import ribbon
from minimeg.lab.drawings.sharding import columns_then_rows, rows_first
from minimeg.lab.pages import memory_page
from minimeg.schedule import build, gpipe, one_f_one_b, pipedream, simulate, zero_bubble_h1
from minimeg.schedule.drawing import gantt, gantt_stack

GPT3 = model("gpt3-175b").shape


def bytes_on_the_wire() -> str:
    """One gradient of 1 GB over 2 to 64 ranks."""
    values = {f"all-reduce, {d} ranks": float(wire_factor("all_reduce", d)) for d in (2, 4, 8, 64)}
    values |= {f"reduce-scatter, {d} ranks": float(wire_factor("reduce_scatter", d)) for d in (2, 8, 64)}
    sentence = "What one rank sends, in sizes of the tensor: an all-reduce approaches 2, a reduce-scatter 1, however many ranks."
    return bars(
        values, title="What a rank sends, in sizes of the tensor", sentence=sentence, chosen="all-reduce, 8 ranks"
    )


def activations_by_stage() -> str:
    """What 1F1B and GPipe hold, p = 4 and m = 8."""
    values = {f"1F1B, rank {r}": float(in_flight(4, r, 8)) for r in range(4)} | {"GPipe, any rank": 8.0}
    sentence = "Micro-batches whose activations a rank holds at its peak: 4, 3, 2, 1 under 1F1B, all 8 under GPipe."
    return bars(values, title="Activations held at the peak, p = 4, m = 8", sentence=sentence, chosen="GPipe, any rank")


def model_states() -> str:
    """ZeRO's Figure 1: 7.5 B parameters over 64 ranks."""
    names = {0: "nothing split", 1: "ZeRO-1: optimizer", 2: "ZeRO-2: + gradients", 3: "ZeRO-3: + weights"}
    values = {name: zero_bytes(7.5e9, 64, stage) / 1e9 for stage, name in names.items()}
    sentence = (
        "GB a rank for 7.5 billion parameters over 64 ranks. minimeg has the second row; the others are on paper."
    )
    return bars(values, title="Model states a rank, GB", sentence=sentence, chosen=names[1])


def parameters_by_stage() -> str:
    """GPT-3 over 8 stages of 8 tensor-parallel ranks."""
    values = {f"stage {stage}": rank_parameters(GPT3, 8, 8, stage) / 1e9 for stage in range(8)}
    sentence = (
        "Billions of parameters a rank holds: the embedding makes the first stage larger, and its tied copy the last."
    )
    return bars(
        values, title="GPT-3 175B over t = 8, p = 8: parameters a rank, billions", sentence=sentence, chosen="stage 0"
    )


def masks() -> str:
    """The masks that four ranks (t = 2, d = 2) draw for a replicated tensor and for one that is cut over tp."""
    import torch

    from minimeg.rng import Key, dropout_mask

    places = [(tp, dp) for dp in range(2) for tp in range(2)]

    def square(cut: bool) -> list[list[float]]:
        keys = [Key(seed=1, microbatch=dp, tp=tp * cut) for tp, dp in places]
        drawn = [
            dropout_mask(torch.Size([10_000]), 0.5, key, torch.device("cpu"), group=None, dim=0, whole=False)
            for key in keys
        ]
        return [[float((one == other).double().mean()) for other in drawn] for one in drawn]

    panels = {"replicated over tp": square(False), "cut over tp": square(True)}
    sentence = (
        "A replicated tensor has one mask in a tensor-parallel group, one that is cut has two; replicas differ always."
    )
    return shared_masks(panels, [f"r{r}  tp{tp} dp{dp}" for r, (tp, dp) in enumerate(places)], sentence)


def learning_rate() -> str:
    """Warm-up and cosine."""
    from minimeg.optimizer import CosineSchedule

    schedule = CosineSchedule(maximum=1e-3, minimum=1e-4, warmup=10, steps=100)
    rates = [schedule(step) for step in range(100)]
    sentence = "The learning rate rises over 10 steps and falls along a cosine to a tenth of its height."
    return line_chart({"rate": rates}, title="One learning rate", sentence=sentence, up="learning rate")


def heat() -> str:
    return heat_map(plan(Job(shape=GPT3, gpus=1024, gpu=GPUS["a100-80g"], batch=model("gpt3-175b").global_batch)))


def own_schedule() -> str:
    return gantt(simulate(build("zb-v", 4, 8), backward=1, weight=1))


def two_schedules() -> str:
    panels = [("GPipe", simulate(gpipe(4, 8))), ("1F1B", simulate(one_f_one_b(4, 8)))]
    panels.append(("ZB-H1", simulate(zero_bubble_h1(4, 8), backward=1, weight=1)))
    return gantt_stack(panels, title="The same work, three orders")


PICTURES: dict[str, Callable[[], str]] = {
    "grid": lambda: Grid(16, tp=2, pp=4).svg(selected_rank=5, ranks_per_node=8),
    "failure": lambda: Grid(8, tp=2, pp=2).svg(selected_rank=5, ranks_per_node=8),
    "reshard_from": lambda: Grid(8, tp=4, pp=2).svg(ranks_per_node=8),
    "comm": bytes_on_the_wire,
    "mappings": f_and_g,
    "linears": columns_then_rows,
    "rows_first": rows_first,
    "cross_entropy": cross_entropy,
    "sequence_parallel": ribbon,
    "recompute": lambda: (
        memory_page(s=2048, b=1, h=12288, a=96, t=8, sequence_parallel=True, recompute="selective").svg
    ),
    "memory": activations_by_stage,
    "schedule": two_schedules,
    "pipeline": lambda: gantt(simulate(build("interleaved", 4, 8))),
    "pipedream": lambda: gantt(simulate(pipedream(4, 8))),
    "zero_bubble": own_schedule,
    "data_parallel": model_states,
    "optimizer": learning_rate,
    "masks": masks,
    "models": parameters_by_stage,
    "dry_run": lambda: memory_page(s=2048, b=1, h=25600, a=160, t=8, sequence_parallel=True, recompute="full").svg,
    "cost": heat,
}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        svg = draw()
        path = folder / f"{name}.svg"
        if not path.exists() or path.read_text(encoding="utf-8") != svg:  # an untouched file is not read again
            path.write_text(svg, encoding="utf-8")


def description(svg: str) -> str:
    """What the picture says of itself."""
    found = search(r"<desc>(.*?)</desc>", svg, DOTALL) or search(r"<title>(.*?)</title>", svg, DOTALL)
    return unescape(found[1].strip()) if found else ""
