"""The layouts that are proven equal to the dense reference, and the table of how closely: docs/equivalence.md.

python -m tests.pipeline.equivalence        runs all, writes the table (about two minutes on two cores)
"""

from pathlib import Path

from tqdm import tqdm

from minimeg.lab.ranks import Ranks
from tests.pipeline.layouts import Layout, compare

TABLE = Path(__file__).parents[2] / "docs" / "equivalence.md"
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))


def _layouts() -> list[Layout]:
    sizes = [(t, d, w // (t * d)) for w in (1, 2, 4, 8) for t in (1, 2, 4, 8) for d in (1, 2, 4, 8) if w % (t * d) == 0]
    return [
        Layout(t, d, p, schedule, chunks, tied, microbatches=max(2, p) if chunks > 1 else 3)
        for t, d, p in sizes
        for schedule, chunks in (SCHEDULES if p > 1 else SCHEDULES[1:2])
        for tied in (True, False)
    ]


LAYOUTS = _layouts()

HEAD = """# Equal to one process

Every row is a run on real processes: a GPT of at least {layers} layers and 27 tokens in the vocabulary (no multiple of any t), in
float64, over three AdamW steps with clipping, with different data on every data-parallel rank, unequal numbers of valid tokens, and one
micro-batch without any. It is compared with a dense GPT in plain torch that shares no code with minimeg: the largest absolute
difference of the losses, of the gradient norms, of any element of any gradient of the first step, and of any parameter after the third.

*one process*: minimeg itself in one process over the same micro-batches. Where only the pipeline is split and the head is untied, no
sum is reordered, and the two are equal bit for bit.

Written by `python -m tests.pipeline.equivalence`; `tests/pipeline/test_equality.py` asserts every row in each run of `make test`.

| tp | dp | pp | schedule | head | loss | norm | gradients | parameters | one process |
|---:|---:|---:|---|---|---:|---:|---:|---:|---|
"""


def row(layout: Layout, found: dict[str, float]) -> str:
    numbers = " | ".join(f"{found[name]:.0e}" for name in ("loss", "norm", "gradients", "parameters"))
    bits = [value for name, value in found.items() if name.endswith("bits")]
    alone = "" if not bits else "bit-equal" if max(bits) == 0 else f"{max(bits):.0e}"
    schedule = (
        (layout.schedule if layout.chunks == 1 else f"{layout.schedule}, n={layout.chunks}") if layout.pp > 1 else ""
    )
    head = "tied" if layout.tied else "untied"
    return f"| {layout.tp} | {layout.dp} | {layout.pp} | {schedule} | {head} | {numbers} | {alone} |\n"


def main() -> None:
    text = HEAD.format(layers=Layout().layers)
    pools: dict[int, Ranks] = {}
    try:
        for layout in tqdm(LAYOUTS, "layouts", disable=None):
            ranks = pools.setdefault(layout.world, Ranks(layout.world, device="cpu"))
            text += row(layout, ranks.call(compare, layout)[0][2])
    finally:
        for ranks in pools.values():
            ranks.close()
    TABLE.write_text(text, encoding="utf-8")
    print(f"written: {len(LAYOUTS)} layouts to docs/{TABLE.name}")


if __name__ == "__main__":
    main()
