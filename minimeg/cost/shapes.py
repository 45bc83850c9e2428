"""The shape of a GPT: five numbers from which parameters, FLOPs, bytes and seconds all follow, and the shapes that the papers print.

See them: ``python -m minimeg.cost --list``.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimeg.schedule.actions import refuse, size_faults


@dataclass(frozen=True)
class GPTShape:
    """A GPT with learned positions, biases, LayerNorm, an MLP of width 4h and an output layer tied to the embedding.

    Attributes:
        layers: L.
        hidden: h, the width of the residual stream.
        heads: a.
        sequence: s, tokens in a sequence.
        vocabulary: v, rows of the embedding.

    Raises:
        ValueError: sizes below 1, hidden not a multiple of heads; all faults in one message.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        faults = size_faults(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            sequence=self.sequence,
            vocabulary=self.vocabulary,
        )
        if not faults and self.hidden % self.heads:
            width = -(-self.hidden // self.heads)
            faults.append(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}; use hidden={width * self.heads} or other heads"
            )
        refuse(faults, "not the shape of a GPT")


@dataclass(frozen=True)
class Model:
    """A shape as it was trained. ``global_batch`` in sequences."""

    shape: GPTShape
    global_batch: int
    source: str


_S19, _N21, _K22 = (
    "Shoeybi et al. 2019, arXiv 1909.08053",
    "Narayanan et al. 2021, arXiv 2104.04473",
    "Korthikanti et al. 2022, arXiv 2205.05198",
)

# The name says billions of parameters as the paper rounds them.
MODELS = {
    "1.2b": Model(GPTShape(40, 1536, 16, sequence=1024), 512, f"{_S19}, Table 1"),
    "2.5b": Model(GPTShape(54, 1920, 20, sequence=1024), 512, f"{_S19}, Table 1"),
    "4.2b": Model(GPTShape(64, 2304, 24, sequence=1024), 512, f"{_S19}, Table 1"),
    "8.3b": Model(GPTShape(72, 3072, 32, sequence=1024), 512, f"{_S19}, Table 1"),
    "1.7b": Model(GPTShape(24, 2304, 24), 512, f"{_N21}, Table 1"),
    "3.6b": Model(GPTShape(30, 3072, 32), 512, f"{_N21}, Table 1"),
    "5.9b": Model(GPTShape(32, 3840, 32), 512, f"{_N21}, Figures 14 and 15"),
    "7.5b": Model(GPTShape(36, 4096, 32), 512, f"{_N21}, Table 1"),
    "18b": Model(GPTShape(40, 6144, 48), 1024, f"{_N21}, Table 1"),
    "22b": Model(GPTShape(48, 6144, 64), 4, f"{_K22}, Table 3"),
    "39b": Model(GPTShape(48, 8192, 64), 1536, f"{_N21}, Table 1"),
    "76b": Model(GPTShape(60, 10240, 80), 1792, f"{_N21}, Table 1"),
    "145b": Model(GPTShape(80, 12288, 96), 2304, f"{_N21}, Table 1"),
    "162b": Model(GPTShape(32, 20480, 128), 128, f"{_N21}, Figure 13"),
    "gpt3-175b": Model(GPTShape(96, 12288, 96), 1536, f"{_N21}, section 5.1 and Table 2"),
    "310b": Model(GPTShape(96, 16384, 128), 2160, f"{_N21}, Table 1"),
    "530b": Model(GPTShape(105, 20480, 128), 2520, f"{_N21}, Table 1"),
    "1t": Model(GPTShape(128, 25600, 160), 3072, f"{_N21}, Table 1"),
}


def model(name: str) -> Model:
    """A model of the papers by name; upper and lower case are alike.

    Raises:
        ValueError: an unknown name.
    """
    refuse([] if name.lower() in MODELS else [f"{name!r} is unknown; use one of {', '.join(MODELS)}"], "model")
    return MODELS[name.lower()]
