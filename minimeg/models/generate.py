"""Text from a trained model: draw the next byte, append it, repeat. One process; see ``--sample`` of minimeg.train."""

from __future__ import annotations

import torch
from torch import Tensor

from minimeg.data import MicroBatch, decode, encode
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.parallel_state import single_process
from minimeg.parameter import load_full_state
from minimeg.rng import Key


@torch.no_grad()
def generate(
    config: GPTConfig, parameters: dict[str, Tensor], prompt: str, length: int, *, seed: int, temperature: float = 0.8
) -> str:
    """``prompt`` and ``length`` more characters. ``parameters``: {global name: full tensor}, as from ``full_state``.

    The model sees the last ``max_sequence_length`` bytes. Non-ASCII bytes, of which half a character could be drawn, are left out.
    """
    state = single_process("cpu")
    dtype = next(iter(parameters.values())).dtype
    model = GPT(config, state.tp).to(dtype).eval()
    load_full_state(model, parameters)
    generator = Key(seed, stream="generate").generator()
    ids = encode(prompt).long()
    for _ in range(length):
        window = ids[None, -config.max_sequence_length :]  # [1, s]
        logits = model(None, MicroBatch(window, window, torch.ones_like(window, dtype=torch.bool), 0, 0))
        probabilities = (logits[-1, 0, :128].double() / temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)])
    return decode(ids)
