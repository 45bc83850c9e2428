"""What of a chunk of layers is run again in backward, and for which micro-batches: Megatron-LM's flags as one object.

    granularity   module or method   forgotten of the (34 + 5as/h) sbh bytes of a layer (Korthikanti et al. 2022, section 4)
    full          uniform            all but 2 sbh for each group of k layers; the last group may be smaller
    full          block              the same for each of the first k layers of a chunk alone; the others keep everything
    selective     core_attn          5as/h: Q K^T, softmax, its dropout; the default: much memory, little work
                  mlp                16: before and after GELU
                  layernorm          4: what both norms put out

**For which micro-batches.** The last stage of a pipeline has one micro-batch in flight and memory to spare, the first has p. So a stage
keeps everything for as many micro-batches as fit, and recomputes the others: a window that slides, since each backward makes
room for the next (Korthikanti et al. 2022, appendix C; Megatron-LM's ``num_microbatches_with_partial_activation_checkpoints``).
Which micro-batches these are follows from the schedule before anything runs: :func:`sliding_window`.

See it run: ``notebooks/11_recomputation.ipynb``; ``python -m minimeg.train --recompute-granularity full``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from minimeg.comm import Group
from minimeg.recompute import Recompute
from minimeg.schedule import Schedule

GRANULARITIES = ("full", "selective")
METHODS = ("uniform", "block")
MODULES = ("core_attn", "mlp", "layernorm")


@dataclass(frozen=True)
class Recomputation:
    """What a GPT chunk recomputes. By default nothing.

    Attributes:
        granularity: "full", "selective" or None.
        method, num_layers: of "full": "uniform" (None means that) or "block", and k (None means 1).
        modules: of "selective".
        distribute: of "full": keep 1/t of each group's input on each tensor-parallel rank, and gather it in backward.
        check: compare everything that a replay saves with the forward's: for looking for a mistake. Saves no memory.
        kept: micro-batches (by their index in the global batch) that are not recomputed.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)
    distribute: bool = False
    check: bool = False
    kept: frozenset[int] = frozenset()

    def faults(self, layers: int, tp: int = 1, sequence_parallel: bool = False) -> list[str]:
        """What forbids it for a model of so many layers, in the words of the flags: one sentence each, none if fine."""
        found = []
        full, selective = self.granularity == "full", self.granularity == "selective"
        if self.granularity is not None and not full and not selective:
            found.append(f"recompute_granularity={self.granularity} is unknown; use one of {', '.join(GRANULARITIES)}")
        if self.method is not None and self.method not in METHODS:
            found.append(f"recompute_method={self.method} is unknown; use one of {', '.join(METHODS)}")
        for name in self.modules:
            if name not in MODULES:
                found.append(f"recompute_modules={name} is unknown; use some of {', '.join(MODULES)}")
        if not self.modules:
            found.append("recompute_modules is empty; use recompute_modules=core_attn")
        if self.num_layers is not None and not 1 <= self.num_layers <= layers:
            found.append(f"recompute_num_layers={self.num_layers} must lie in 1..{layers}, the number of layers")
        need = "needs recompute_granularity=full"
        for name, value in (("recompute_method", self.method), ("recompute_num_layers", self.num_layers)):
            if value is not None and not full:
                found.append(f"{name}={value} {need}; selective recomputation chooses recompute_modules instead")
        if self.modules != ("core_attn",) and not selective:
            found.append(f"recompute_modules={' '.join(self.modules)} needs recompute_granularity=selective")
        if self.distribute and not full:
            found.append(f"distribute_saved_activations {need}: only whole inputs of layers are kept")
        if self.distribute and tp == 1:
            found.append("distribute_saved_activations needs ranks to share with; leave it out for tp=1")
        if self.distribute and sequence_parallel and tp > 1:
            found.append("distribute_saved_activations: sequence_parallel has cut them already; use one of the two")
        if self.check and self.granularity is None:
            found.append("check_recompute needs a recompute_granularity, full or selective")
        return found

    def of(self, microbatch: int, group: Group) -> Plan:
        """What is to be done for one micro-batch."""
        if self.granularity is None or microbatch in self.kept:
            return NOTHING
        how = Recompute(group=group, distribute=self.distribute, check=self.check)
        return Plan(self, how)


class Plan:
    """What to recompute in the layers of a chunk for one micro-batch: they ask it to call their parts."""

    def __init__(self, recomputation: Recomputation, how: Recompute) -> None:
        self.recomputation, self.how = recomputation, how

    def groups(self, layers: int) -> Iterator[tuple[range, bool]]:
        """The layers 0..layers-1 in order, in groups, and whether a group is recomputed as a whole."""
        if self.recomputation.granularity != "full":
            yield range(layers), False
            return
        k = min(self.recomputation.num_layers or 1, layers)
        if self.recomputation.method == "block":
            yield from ((range(i, i + 1), True) for i in range(k))
            yield range(k, layers), False
        else:
            yield from ((range(i, min(i + k, layers)), True) for i in range(0, layers, k))

    def group(self, again: bool, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``run(x)`` for a group of layers."""
        return self.how(run, x) if again else run(x)

    def module(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, recomputed if this module is chosen."""
        return self.how(function, x) if self._chosen(name) else function(x)

    def module_into(
        self, name: str, consumer: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """``consumer(function(x))``; if the module is chosen, what it returns is not kept either."""
        return self.how.into(consumer, function, x) if self._chosen(name) else consumer(function(x))

    def _chosen(self, name: str) -> bool:
        return self.recomputation.granularity == "selective" and name in self.recomputation.modules


NOTHING = Plan(Recomputation(), Recompute())


def sliding_window(schedule: Schedule, rank: int, size: int) -> tuple[frozenset[int], ...]:
    """For each chunk of a rank the micro-batches, 0..m-1, that keep everything, so that at most ``size`` of them do at any time.

    A forward that finds room in the window keeps everything until its last backward; one that finds none will be recomputed. With
    several chunks a rank each (chunk, micro-batch) counts as one. Korthikanti et al. 2022, appendix C.
    """
    if size < 0:
        raise ValueError(f"size={size} must be at least 0 micro-batches")
    kept: list[set[int]] = [set() for _ in range(schedule.chunks)]
    window: set[tuple[int, int]] = set()
    last = "W" if schedule.split else "B"
    for kind, microbatch, chunk in schedule.ranks[rank]:
        if kind == "F" and len(window) < size:
            window.add((chunk, microbatch))
            kept[chunk].add(microbatch)
        elif kind == last:
            window.discard((chunk, microbatch))
    return tuple(map(frozenset, kept))


def window_that_fits(memory: float, in_flight: int, everything: float, recomputed: float, replay: float) -> int:
    """How many of ``in_flight`` micro-batches may keep everything. All sizes in bytes, or all in any one unit.

    Args:
        memory: what there is for activations.
        everything, recomputed: what one micro-batch holds between its forward and its backward, without and with recomputation.
        replay: what backward of a recomputed micro-batch holds on top: one group of layers.

    Raises ValueError if not even ``in_flight`` recomputed micro-batches fit.
    """
    if in_flight * everything <= memory:
        return in_flight
    room = memory - in_flight * recomputed - replay
    if room < 0:
        least = in_flight * recomputed + replay
        raise ValueError(f"memory={memory:g} is too little: {in_flight} recomputed micro-batches hold {least:g}")
    return min(in_flight - 1, int(room // (everything - recomputed)))
