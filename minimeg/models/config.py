"""The shape of a GPT, what forbids it, and which layers lie where.

See it run: ``python -m minimeg.train --num-layers 3 --tp 3`` says all that is wrong at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model and its dropouts; nothing about how it is cut, apart from sequence parallelism."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_sequence_length: int
    ffn_hidden_size: int | None = None  # None: 4 h
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    tied: bool = True
    sequence_parallel: bool = False
    whole_dropout_masks: bool = False
    init_std: float = 0.02

    @property
    def ffn(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    def faults(self, tp: int = 1, virtual_stages: int = 1) -> list[str]:
        """What forbids this model over ``tp`` ranks and ``virtual_stages`` = p n chunks: one sentence each, none if fine."""
        found = []
        sizes = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "vocab_size": self.vocab_size,
            "max_sequence_length": self.max_sequence_length,
            "ffn_hidden_size": self.ffn,
        }
        found += [f"{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
        if found:
            return found  # the rest would divide by what is missing
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            divisors = [a for a in range(1, self.hidden_size + 1) if self.hidden_size % a == 0]
            found.append(
                f"num_attention_heads={heads} must divide hidden_size={self.hidden_size}; use one of {divisors}"
            )
        for name, size in (("num_attention_heads", heads), ("ffn_hidden_size", self.ffn)):
            if size % tp:
                legal = [t for t in range(1, size + 1) if size % t == 0]
                found.append(f"{name}={size} must be a multiple of tp={tp}; legal tp: {legal}")
        if self.num_layers < virtual_stages:
            found.append(
                f"num_layers={self.num_layers} is less than the {virtual_stages} pipeline chunks (pp x vpp): one would be "
                f"empty; use at least {virtual_stages} layers or fewer chunks"
            )
        for name, p in (("hidden_dropout", self.hidden_dropout), ("attention_dropout", self.attention_dropout)):
            if not 0 <= p < 1:
                found.append(f"{name}={p} must lie in [0, 1), e.g. 0.1")
        if self.sequence_parallel and self.max_sequence_length % tp:
            legal_length = -(-self.max_sequence_length // tp) * tp
            found.append(
                f"sequence_parallel: max_sequence_length={self.max_sequence_length} must be a multiple of tp={tp}; use {legal_length}"
            )
        return found


def layers_of(virtual_stage: int, virtual_stages: int, num_layers: int) -> range:
    """The global indices of the layers of one virtual stage.

    Each gets L // V, and the L mod V extra layers go one each to the stages just before the last: the last has the head's work
    already, and the first holds the most micro-batches in flight.
    """
    share, extras = divmod(num_layers, virtual_stages)
    if share == 0:
        raise ValueError(
            f"num_layers={num_layers} is less than the {virtual_stages} virtual stages; use at least {virtual_stages}"
        )
    first_with_extra = virtual_stages - 1 - extras

    def start(stage: int) -> int:
        return stage * share + min(max(stage - first_with_extra, 0), extras)

    return range(start(virtual_stage), start(virtual_stage + 1))
