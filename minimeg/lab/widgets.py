"""Sliders for the pages of :mod:`minimeg.lab.pages`: rank groups, schedules, shards, memory.

Each control has a name, works by keyboard, and shows its number. What a setting forbids is said in words in place of the picture.
On a page that does not run (GitHub, a printout) one line stands here; the same picture was drawn above by a plain call.

See it run: the last part of ``notebooks/01_rank_groups.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import permutations
from typing import Any

from minimeg.cost.flops import RECOMPUTE
from minimeg.lab.pages import Page, memory_page, rank_page, schedule_page, sharding_page
from minimeg.schedule import NAMES, ScheduleError

VIEW = "application/vnd.jupyter.widget-view+json"


class Explorer:
    """Controls above a page that is drawn anew whenever one of them moves."""

    def __init__(self, page: Callable[..., Page], controls: dict[str, Any], title: str) -> None:
        import ipywidgets

        self.page, self.controls, self.title = page, controls, title
        self.shown: Any = ipywidgets.HTML()
        wrap = ipywidgets.Layout(flex_flow="row wrap", width="760px")
        self.box: Any = ipywidgets.VBox([ipywidgets.HBox(list(controls.values()), layout=wrap), self.shown])
        for control in controls.values():
            control.observe(lambda change: self.draw(), names="value")
        self.draw()

    def draw(self) -> None:
        """Show the page of the present settings, or why there is none."""
        try:
            page = self.page(**{name: control.value for name, control in self.controls.items()})
        except (ValueError, ScheduleError) as error:
            self.shown.value = f'<pre style="color:#B33A00;white-space:pre-wrap">{escape(str(error))}</pre>'
            return
        lines = escape("\n".join(page.lines))
        self.shown.value = f'{page.svg}<pre style="margin:8px 14px">{lines}</pre>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        view = {"model_id": self.box.model_id, "version_major": 2, "version_minor": 0}
        return {"text/plain": f"[{self.title}: run the notebook to move its sliders]", VIEW: view}


def _slider(name: str, value: float, low: float, high: float, step: float = 1) -> Any:
    import ipywidgets

    whole = isinstance(value, int) and step == 1
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    layout = ipywidgets.Layout(width="370px")
    style = {"description_width": "120px"}
    return kind(
        value=value, min=low, max=high, step=step, description=name, layout=layout, style=style, continuous_update=False
    )


def _choice(name: str, value: Any, options: Any) -> Any:
    import ipywidgets

    layout, style = ipywidgets.Layout(width="370px"), {"description_width": "120px"}
    return ipywidgets.Dropdown(value=value, options=list(options), description=name, layout=layout, style=style)


def rank_explorer() -> Explorer:
    """Sizes, order and node; pick a rank to see its groups."""
    controls = {
        "ranks": _choice("ranks", 16, (4, 8, 16, 32, 64)),
        "node": _choice("ranks a node", 8, (2, 4, 8, 16)),
        "tp": _choice("tp", 2, (1, 2, 4, 8)),
        "cp": _choice("cp", 1, (1, 2, 4)),
        "pp": _choice("pp", 4, (1, 2, 4, 8)),
        "order": _choice("order", "tp-cp-dp-pp", map("-".join, permutations(("tp", "cp", "dp", "pp")))),
        "rank": _slider("rank", 5, 0, 63),
    }
    return Explorer(rank_page, controls, "rank-group explorer")


def schedule_explorer(name: str = "1f1b", p: int = 4, m: int = 8, n: int = 1) -> Explorer:
    """A schedule, its sizes and the times of F, B, W and of a message."""
    controls = {
        "name": _choice("schedule", name, NAMES),
        "p": _slider("stages p", p, 1, 8),
        "m": _slider("micro-batches m", m, 1, 24),
        "n": _slider("chunks n", n, 1, 4),
        "forward": _slider("time of F", 1.0, 0.5, 3, 0.5),
        "backward": _slider("time of B", 2.0, 0.5, 4, 0.5),
        "weight": _slider("time of W", 0.0, 0, 2, 0.5),
        "latency": _slider("latency", 0.0, 0, 1, 0.25),
    }
    return Explorer(schedule_page, controls, "schedule explorer")


def sharding_stepper() -> Explorer:
    """Columns or rows first, over how many ranks, up to which step."""
    controls = {
        "first": _choice("first cut by", "columns", ("columns", "rows")),
        "t": _choice("ranks t", 2, (1, 2, 4)),
        "step": _slider("step", 4, 1, 4),
    }
    return Explorer(sharding_page, controls, "sharding stepper")


def memory_calculator() -> Explorer:
    """What a layer keeps for backward."""
    controls = {
        "s": _choice("sequence s", 64, (16, 32, 64, 128, 1024, 2048, 4096)),
        "b": _slider("micro-batch b", 2, 1, 8),
        "h": _choice("hidden h", 64, (16, 32, 64, 128, 4096, 12288)),
        "a": _choice("heads a", 4, (1, 2, 4, 8, 16, 32, 96)),
        "t": _choice("ranks t", 1, (1, 2, 4, 8)),
        "sequence_parallel": _choice("seq. parallel", False, (("no", False), ("yes", True))),
        "recompute": _choice("recompute", "none", RECOMPUTE),
    }
    return Explorer(memory_page, controls, "memory calculator")
