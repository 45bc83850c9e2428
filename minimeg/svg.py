"""SVG as text: one function, so that equal pictures are equal text and a notebook's stored picture can be compared exactly.

The pictures of the course share a width, a font and their colours (Okabe & Ito: distinct for colour-blind readers too). Pure Python.

See it: ``python -m minimeg.schedule 1f1b --pp 4 --microbatches 8 --svg out.svg``.
"""

from __future__ import annotations

from math import floor, log10
from xml.sax.saxutils import escape

WIDTH = 760
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
INK, QUIET, IDLE, WHITE = "#222222", "#5F5F5F", "#F2F2F2", "#FFFFFF"
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"


def element(tag: str, *inside: str, **attributes: object) -> str:
    """One element around ``inside``, which is SVG already (see ``text``). Attributes are sorted; those that are None are left out.

    ``fill_opacity=1`` becomes ``fill-opacity="1"``.
    """
    shown = sorted((name.replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    opening = tag + "".join(f' {name}="{escape(str(value), {chr(34): "&quot;"})}"' for name, value in shown)
    return f"<{opening}>{''.join(inside)}</{tag}>" if inside else f"<{opening}/>"


def text(words: str, **attributes: object) -> str:
    """A text element; what is not allowed in XML is escaped."""
    return element("text", escape(words), **attributes)


def picture(height: int, title: str, description: str, *inside: str) -> str:
    """A whole SVG, 760 px wide, on a white ground of its own so that it can stand on a dark page.

    Args:
        title, description: what a screen reader says; the description is one sentence saying what there is to see.
    """
    return element(
        "svg",
        "\n",
        *(f"{line}\n" for line in (element("title", escape(title)), element("desc", escape(description)))),
        element("rect", fill=WHITE, height=height, rx=6, width=WIDTH) + "\n",
        *(f"{line}\n" for line in inside),
        fill=INK,
        font_family=FONT,
        font_size=12,
        role="img",
        style="max-width:100%",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        xmlns="http://www.w3.org/2000/svg",
    )


def tint(colour: str, keep: float) -> str:
    """``colour`` mixed with white; keep=1 is the colour itself. tint("#0072B2", 0.6) == "#66AAD1"."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - keep * (255 - part)):02X}" for part in parts)


def hatching(name: str, colour: str, x_scale: int = 1) -> str:
    """A fill for ``fill="url(#name)"``: stripes at 45 degrees, also where x is drawn at 1/x_scale; ``name``: unique on the page."""
    ground = element("rect", fill=colour, height=6, width=6)
    stripe = element("path", d="M1 0V6", stroke=tint(colour, 0.7), stroke_width=2)
    turned = "rotate(45)" if x_scale == 1 else f"scale({x_scale} 1) rotate(45)"
    size = {"height": 6, "width": 6, "patternUnits": "userSpaceOnUse", "patternTransform": turned}
    return element("pattern", ground, stripe, id=name, **size)


def number(value: float) -> str:
    """Four digits, or all before the point; no trailing zeros."""
    return f"{value:.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"


def round_steps(length: float, least: float) -> list[str]:
    """0, step, 2 step, .. up to ``length``, as text, step the smallest of 1, 2, 5 times a power of ten >= least > 0."""
    power = floor(log10(least))
    for digit, exponent in ((1, power), (2, power), (5, power), (1, power + 1), (2, power + 1)):
        step = float(f"{digit}e{exponent}")
        if step >= least:
            break
    return ["0", *(f"{i * step:.{max(0, -exponent)}f}" for i in range(1, floor(length / step) + 1))]
