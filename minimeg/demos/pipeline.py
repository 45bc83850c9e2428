"""Who holds what, and who waits? 1F1B on these ranks, every stage y = w x with w = rank + 1, micro-batch k carrying the number k + 1.

python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.pipeline
"""

import torch

from minimeg.comm import ledger
from minimeg.parallel_state import initialize_model_parallel, world_size_of_environment
from minimeg.pipeline import run
from minimeg.schedule import one_f_one_b


class Times(torch.nn.Module):
    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def input_shape(self, microbatch: float) -> tuple[tuple[int, ...], torch.dtype]:
        return (1,), torch.float64

    output_shape = input_shape

    def forward(self, x: torch.Tensor | None, microbatch: float) -> torch.Tensor:
        return self.w * (torch.tensor([microbatch], dtype=torch.float64) if x is None else x)


if __name__ == "__main__":
    p, m = world_size_of_environment(), 6
    schedule, batch = one_f_one_b(p, m), [k + 1.0 for k in range(m)]
    with initialize_model_parallel(pipeline_model_parallel_size=p, device="cpu") as state:
        stage = Times(state.rank + 1.0)
        with ledger() as book:
            result = run(schedule, [stage], batch, group=state.pp, loss=lambda y, _: y.sum(), normaliser=1.0)
        assert stage.w.grad is not None
        mine = f"dL/dw {stage.w.grad.item():<5g} held {result.peak_in_flight}  sent {book.total('count', op='send'):<3}"
        everyone = state.pp.all_gather_json(mine + " ".join(map(str, result.actions)))
        if state.rank == 0:
            print(f"sum of (k + 1) = {sum(batch):g}; L = 1 * 2 * ... * p * that = {result.loss.item():g}")
            print("\n".join(f"rank {rank}  {line}" for rank, line in enumerate(everyone)))
