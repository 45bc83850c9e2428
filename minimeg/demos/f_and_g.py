"""Why does an identity have an all-reduce for a gradient? y = g(w f(x)) with w = rank + 1 and x = 1, right and wrong.

python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.f_and_g
"""

import torch
from torch import Tensor

from minimeg.comm import Group, ledger
from minimeg.mappings import copy_to_tensor_model_parallel_region as f
from minimeg.mappings import reduce_from_tensor_model_parallel_region as g
from minimeg.parallel_state import initialize_model_parallel, world_size_of_environment


def numbers(group: Group, with_f: bool) -> list[float]:
    """-> y, dy/dx, dy/dw as this rank sees them."""
    x, w = torch.ones(1, requires_grad=True), torch.tensor([group.rank + 1.0], requires_grad=True)
    y: Tensor = g(w * (f(x, group) if with_f else x), group)
    x_grad, w_grad = torch.autograd.grad(y, (x, w))
    return [y.item(), x_grad.item(), w_grad.item()]


if __name__ == "__main__":
    t = world_size_of_environment()
    with initialize_model_parallel(t, device="cpu") as state:
        with ledger() as book:
            right = numbers(state.tp, with_f=True)
        everyone = state.tp.all_gather_json([right, numbers(state.tp, with_f=False)])
        if state.rank == 0:
            serial = t * (t + 1) / 2
            print(f"one process: y = {serial:g}   dy/dx = {serial:g}   dy/dw = 1 for each w\n")
            print("           with f                     f forgotten")
            for rank, (with_f, without) in enumerate(everyone):
                columns = "      ".join(f"y {y:<4g} x.grad {x:<4g} w.grad {w:g}" for y, x, w in (with_f, without))
                print(f"rank {rank}     {columns}")
            print(f"\ny is the same in both, so the loss never tells. What rank 0 said, with f:\n{book.table()}")
