"""Why column first, then row? relu(X A) B, with A cut by columns and B by rows: one sum, at the end.

python -m torch.distributed.run --nproc-per-node 2 -m minimeg.demos.linears
"""

import torch

from minimeg.comm import ledger
from minimeg.layers import ColumnParallelLinear, RowParallelLinear
from minimeg.parallel_state import initialize_model_parallel, world_size_of_environment
from minimeg.parameter import load_full_state, name_globally

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
A = torch.tensor([[1.0, -1.0, 2.0, 0.0], [0.0, 1.0, -1.0, 1.0]])
B = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [1.0, 1.0]])
BIAS = torch.tensor([0.0, 100.0])

if __name__ == "__main__":
    with initialize_model_parallel(world_size_of_environment(), device="cpu") as state, torch.no_grad():
        a, b = ColumnParallelLinear(2, 4, group=state.tp, bias=False), RowParallelLinear(4, 2, group=state.tp)
        model = torch.nn.ModuleDict({"a": a, "b": b})
        name_globally(model)
        load_full_state(model, {"a.weight": A.t(), "b.weight": B.t(), "b.bias": BIAS})  # weights lie as [out, in]
        with ledger() as book:
            hidden = torch.relu(a(X))
            out = b(hidden)
        mine = {"columns of A": a.weight.t(), "relu(X A)": hidden, "rows of B": b.weight.t(),
                "partial sum": hidden @ b.weight.t(), "sum + bias": out}  # fmt: skip
        for rank, seen in enumerate(state.tp.all_gather_json({name: x.tolist() for name, x in mine.items()})):
            if state.rank == 0:
                print(f"rank {rank}", *(f"{name:<14}{x}" for name, x in seen.items()), sep="\n    ")
        if state.rank == 0:
            print(f"\none process       {(torch.relu(X @ A) @ B + BIAS).tolist()}\nwhat rank 0 said\n{book.table()}")
