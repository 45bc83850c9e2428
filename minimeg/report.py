"""One page about one run: loss, throughput, bubble and the timeline, in a file that needs nothing else.

python -m minimeg.train --run-dir out/run
python -m minimeg.report out/run               writes out/run/report.html
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from minimeg.records import RUN, TIMELINE, read_metrics

# name in metrics.jsonl -> (title, unit)
CURVES = {
    "loss": ("Loss", "nats a byte"),
    "norm": ("Gradient norm", ""),
    "tokens_per_second": ("Throughput", "tokens/s"),
    "model_flops_utilisation": ("Model FLOPs utilisation", "share of the peak"),
    "bubble": ("Bubble, measured", "share of the step"),
    "wire_bytes": ("Sent by rank 0", "bytes a step"),
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
figure { margin: 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; } td, th { text-align: left; padding: .15rem 1.2rem .15rem 0; }
"""


def page(folder: Path) -> str:
    """The report of a run as HTML. ValueError if ``folder`` holds no metrics."""
    metrics = read_metrics(folder)
    if not metrics:
        raise ValueError(f"{folder} holds no finished step yet")
    about = json.loads((folder / RUN).read_text(encoding="utf-8")) if (folder / RUN).is_file() else {}
    last = metrics[-1]
    parts = [
        f"<h1>{escape(folder.name)}</h1>",
        f"<p>{len(metrics)} steps; at the end a loss of {_short(last.get('loss'))}.</p>",
    ]
    for name, (title, unit) in CURVES.items():
        points = _points(metrics, name)
        if points:
            dots = _points(metrics, "validation_loss") if name == "loss" else []
            parts += [f"<h2>{title}</h2>", f"<figure>{_curve(points, unit, dots)}</figure>"]
    if (folder / TIMELINE).is_file():
        parts += [
            "<h2>Timeline of the last step</h2>",
            f"<figure>{(folder / TIMELINE).read_text(encoding='utf-8')}</figure>",
        ]
    rows = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in about.items())
    parts += [f"<h2>Flags</h2><table>{rows}</table>"] if rows else []
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(folder.name)}</title>'
    )
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(parts)}</body></html>\n'


def _points(metrics: Sequence[Mapping[str, float | None]], name: str) -> list[tuple[float, float]]:
    """(step, number) of the steps that have the number."""
    pairs = [(line["step"], line.get(name)) for line in metrics]
    return [(step, number) for step, number in pairs if step is not None and number is not None]


def _short(number: float | None) -> str:
    return "no number" if number is None else f"{number:.4g}"


def _curve(points: Sequence[tuple[float, float]], unit: str, dots: Sequence[tuple[float, float]]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "minimeg", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 2.8), layout="constrained")
        axes = figure.subplots()
        axes.plot([x for x, _ in points], [y for _, y in points], color="#0072B2", linewidth=1.5)
        if dots:
            axes.plot(
                [x for x, _ in dots], [y for _, y in dots], "o", color="#D55E00", markersize=5, label="validation"
            )
            axes.legend(frameon=False)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minimeg.report", description="Draw a run's records as one HTML page."
    )
    parser.add_argument("run", type=Path, help="the folder given to --run-dir")
    parser.add_argument("--output", type=Path, help="default: RUN/report.html")
    options = parser.parse_args(arguments)
    output = options.output or options.run / "report.html"
    try:
        text = page(options.run)
    except ValueError as error:
        print(f"minimeg.report: error: {error}", file=sys.stderr)
        return 2
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"written: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
