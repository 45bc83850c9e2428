"""A transformer layer as a ribbon that is as wide as what one rank holds of the activation there.

Without sequence parallelism it is wide between the linears; with it, narrow everywhere, and the collectives change their names.
See ``notebooks/05_sequence_parallelism.ipynb``.
"""

from __future__ import annotations

from collections.abc import Iterator

from minimeg.svg import BLUE, INK, QUIET, element, picture, text, tint

LEFT, RIGHT, WHOLE = 24, 736, 72  # the ribbon's ends, and its width where a rank holds everything
# What a layer does, in order; True where the linears cut the work over the ranks, False where each rank has all h numbers.
PARTS = (
    ("norm", False), ("attention", True), ("dropout, residual", False), ("norm", False), ("MLP", True), ("dropout, residual", False),
)  # fmt: skip


def ribbon(t: int = 4) -> str:
    """Two ribbons for t ranks: tensor parallelism alone, and with sequence parallelism."""
    parts = [
        text(f"tensor parallelism, t = {t}", font_size=14, font_weight="bold", x=LEFT, y=26),
        *_ribbon(80, t, sequence_parallel=False),
        text("with sequence parallelism", font_size=14, font_weight="bold", x=LEFT, y=216),
        *_ribbon(270, t, sequence_parallel=True),
    ]
    sentence = (
        f"Tensor parallelism alone leaves all of the activation on each of {t} ranks in norms, dropouts and residuals; with sequence "
        f"parallelism a rank holds 1/{t} of it everywhere, and each all-reduce has become a reduce-scatter and an all-gather."
    )
    return picture(386, "what one rank holds along a layer", sentence, *parts)


def _ribbon(top: int, t: int, sequence_parallel: bool) -> Iterator[str]:
    middle, step = top + WHOLE // 2, (RIGHT - LEFT) // len(PARTS)
    for index, (name, cut) in enumerate(PARTS):
        x, narrow = LEFT + index * step, cut or sequence_parallel
        width = WHOLE // t if narrow else WHOLE
        fill = tint(BLUE, 0.35) if cut else tint(INK, 0.14)
        box = {"height": width, "width": step, "x": x, "y": middle - width // 2}
        yield element("rect", fill=fill, stroke=INK, **box)
        yield text(name, text_anchor="middle", x=x + step // 2, y=top + WHOLE + 18)
        shape = "all h" if not narrow else "h/t" if cut else "s/t"
        yield text(shape, fill=QUIET, font_size=11, text_anchor="middle", x=x + step // 2, y=top + WHOLE + 34)
        if cut:
            yield from _notch(x, top, "all-gather" if sequence_parallel else "f")
            yield from _notch(x + step, top, "reduce-scatter" if sequence_parallel else "g: all-reduce")


def _notch(x: int, top: int, name: str) -> Iterator[str]:
    yield element(
        "line", stroke=INK, stroke_dasharray="3 3", stroke_width=2, x1=x, x2=x, y1=top - 14, y2=top + WHOLE + 4
    )
    yield text(name, font_size=11, text_anchor="middle", x=x, y=top - 20)
