"""Measured | formula: what a layer holds between forward and backward, and what each stage of a pipeline of four does.

python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.activation_memory
"""

import torch

from minimeg.data import MicroBatch
from minimeg.memory_table import WHOLE, gather_rows, layers_formula, measure_layers, measure_step, stage_row, table
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.models.recomputation import Recomputation
from minimeg.parallel_state import initialize_model_parallel, world_size_of_environment
from minimeg.schedule import build

S, B, H = 128, 2, 256
CONFIG = GPTConfig(8, H, 8, 256, S, hidden_dropout=0.1, attention_dropout=0.1)
WAYS = [
    WHOLE,
    Recomputation("selective"),
    Recomputation("selective", modules=("core_attn", "mlp")),
    Recomputation("full"),
]

if __name__ == "__main__":
    p = world_size_of_environment()
    with initialize_model_parallel(p, device="cpu") as state:
        rows = [measure_layers(CONFIG, state.tp, S, B, how) for how in WAYS]
        print(f"a layer over t = {p}, in sbh bytes\n{table(rows, S * B * H)}\n" if state.rank == 0 else "", end="")
    ids = torch.zeros(B, S, dtype=torch.int64)
    batch = [MicroBatch(ids, ids, ids == 0, i, 0) for i in range(2 * p)]
    with initialize_model_parallel(1, p, device="cpu") as state:
        for name, n in (("1f1b", 1), ("interleaved", 2)):
            schedule = build(name, p, 2 * p, chunks=n)
            chunks = [GPT(CONFIG, state.tp, schedule.virtual_stage(state.rank, c), p * n).bfloat16() for c in range(n)]
            chunk = layers_formula(CONFIG, S, B, 1, layers=8 // (p * n))
            row = stage_row(measure_step(schedule, chunks, batch, state.pp), schedule, state.rank, chunk)
            rows = gather_rows(row, state.pp)
            words = f"\n{name}: the layers of each stage of p = {p}\n{table(rows, S * B * H)}\n"
            print(words if state.rank == 0 else "", end="")
