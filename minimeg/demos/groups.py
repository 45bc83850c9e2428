"""Who talks to whom: each rank's coordinates, its groups, a sum over each, and a message down the pipeline.

python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.groups
"""

import torch

from minimeg.comm import Group, ledger
from minimeg.parallel_state import ParallelState, initialize_model_parallel, world_size_of_environment


def sees(state: ParallelState) -> list[str]:
    """Every rank holds its number + 1. What it hears from the others, group by group."""

    def line(group: Group) -> str:
        total = group.all_reduce(torch.tensor(state.rank + 1.0)).item()
        return f"{group.name} {list(group.ranks)!s:<16} position {group.rank}   sum of (rank + 1) = {total:g}"

    heard = [line(group) for group in (state.tp, state.dp, state.pp)]
    if state.pp.rank < state.pp.size - 1:
        state.pp.isend(torch.tensor([10.0 * state.rank]), state.pp.rank + 1).wait()
    if state.pp.rank > 0:
        message = state.pp.irecv((1,), torch.float32, state.pp.rank - 1).wait()
        heard.append(f"stage {state.pp.rank} heard {message.item():g} from stage {state.pp.rank - 1}")
    return heard


if __name__ == "__main__":
    n = world_size_of_environment()
    with initialize_model_parallel(2 - n % 2, 2 if n % 4 == 0 else 1, device="cpu") as state:
        with ledger() as book:
            heard = sees(state)
        for rank, lines in enumerate(state.world.all_gather_json([*heard, *book.table().splitlines()])):
            if state.rank == 0:
                title = f"\n{state.grid}\n\n" if rank == 0 else "\n"
                print(f"{title}rank {rank}  {state.grid.coordinates(rank)}", *lines, sep="\n    ")
