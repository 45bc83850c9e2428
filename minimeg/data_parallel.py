"""Who is reduced over which group, and when: the order of gradient reductions around the last backward.

A gradient is complete only when every rank that saw part of the data, or part of the tokens, has added its share. Three sums, in
this order (Megatron-LM's ``finalize_model_grads``):

1. **tp**: replicated parameters that each rank used on its own tokens only (sequence parallelism: ``shard.partial_over_tp``).
2. **dp x cp**: everything, in buckets (buckets.py). ZeRO-1 reduce-scatters: a rank gets the sum of the part that it will update.
3. **embedding**: a tied word embedding lives on the first and the last stage; the two copies add their gradients and so stay
   bit-equal after every step.

*When* matters as much as what. Summed after every micro-batch, the first gradient would be counted again and again; summed when "all
forwards are done", the last stage is right and the first is wrong. Only the pipeline executor knows the last action that touches a
chunk. It says so twice:

    last_backward(chunk)   before the last backward: a bucket leaves as soon as it is full, while backward goes on with earlier layers
    ready(chunk)           after it: whatever has not left leaves now (all of it, where weight gradients come later than B)

**Order.** Ranks may complete gradients in different orders, but a collective that they begin in different orders never ends. So
bucket k leaves after buckets 0..k-1, whichever is full first (as in PyTorch's DistributedDataParallel, Li et al. 2020, section 3.2.3).

Nothing is divided here: the loss was divided by the number of valid tokens of the whole batch, so gradients simply add.

See it run: ``notebooks/12_data_parallelism.ipynb``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from minimeg.buckets import Bucket, Piece, cut_into_buckets
from minimeg.comm import Pending, phase
from minimeg.parallel_state import ParallelState
from minimeg.parameter import Shard, named_shards

# Large enough that latency does not count, small enough to begin while others are still computed.
BUCKET_ELEMENTS = 4_000_000


@dataclass(eq=False)
class _Departures:
    """The buckets of one chunk in one step: which gradients are still missing, and how many buckets have left."""

    buckets: list[Bucket]
    missing: list[set[int]] = field(default_factory=list)  # by bucket: id of each parameter
    left: int = 0
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    ready: bool = False


@dataclass(eq=False)
class GradientReducer:
    """Sums the gradients of this rank's chunks over the groups they belong to.

    From its construction on ``param.grad`` is a view of a bucket, in float32 for half precision. A parameter without a gradient counts
    as zeros: its peers wait for it in the same collective. After :meth:`finish` the gradients are complete; with
    ``use_distributed_optimizer`` (ZeRO-1) only those elements that this rank steps, see :meth:`pieces`.
    """

    chunks: Sequence[nn.Module]
    state: ParallelState
    bucket_elements: int = BUCKET_ELEMENTS
    use_distributed_optimizer: bool = False
    buckets: list[list[Bucket]] = field(init=False)  # by chunk, in the order in which they leave
    largest: list[tuple[Shard, Tensor]] = field(default_factory=list, init=False)  # |gradient|, of this rank alone

    def __post_init__(self) -> None:
        parts = self.state.dp_cp.size if self.use_distributed_optimizer else 1
        self.buckets = []
        for chunk in self.chunks:
            trained = [(param, shard) for _, param, shard in named_shards(chunk) if param.requires_grad]
            self.buckets.append(cut_into_buckets(trained, self.bucket_elements, parts))
        for bucket in self._all():
            bucket.attach()
        self._departures = [_Departures(buckets) for buckets in self.buckets]
        self._under_way: list[tuple[Bucket, Pending]] = []

    # ---- during the last backward ------------------------------------------------------------------------------------------

    def last_backward(self, chunk: int) -> None:
        """The backward that begins now completes the gradients of this chunk: send each bucket as soon as it is full."""
        departures = self._departures[chunk]
        if self.state.dp_cp.size == 1 or departures.hooks:
            return
        departures.missing = [{id(param) for param, _ in bucket.members} for bucket in departures.buckets]
        for index, bucket in enumerate(departures.buckets):
            for param, _ in bucket.members if not bucket.partial else []:
                hook = partial(self._arrived, departures, index)
                departures.hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _arrived(self, departures: _Departures, index: int, param: Tensor) -> None:
        if index < departures.left:
            name = next(shard.name for p, shard in departures.buckets[index].members if p is param)
            raise RuntimeError(f"{name} got another gradient after its bucket had left: it would be lost")
        departures.missing[index].discard(id(param))
        while departures.left < len(departures.buckets) and not departures.missing[departures.left]:
            self._send_next(departures)

    # ---- after it ----------------------------------------------------------------------------------------------------------

    def ready(self, chunk: int) -> None:
        """The gradients of a chunk are final on this rank: send what has not left. Once a step and chunk, else RuntimeError."""
        departures = self._departures[chunk]
        if departures.ready:
            raise RuntimeError(f"chunk {chunk} was reduced twice in one step: its gradients would be counted twice")
        departures.ready = True
        for hook in departures.hooks:
            hook.remove()
        while departures.left < len(departures.buckets):
            self._send_next(departures)

    def finish(self) -> None:
        """Wait for what has left, for every chunk, then add up the copies of a tied embedding."""
        missing = [chunk for chunk, departures in enumerate(self._departures) if not departures.ready]
        if missing:
            raise RuntimeError(f"chunks {missing} were never ready: the step did not finish")
        with phase("gradients"):
            for bucket, pending in self._under_way:
                self._mine(bucket).copy_(pending.wait())
            self._sum_tied_copies()
        self._under_way.clear()
        self._departures = [_Departures(buckets) for buckets in self.buckets]

    def require_finished(self) -> None:
        """RuntimeError between :meth:`ready` and :meth:`finish`: the sums are not there yet."""
        under_way = [chunk for chunk, departures in enumerate(self._departures) if departures.ready]
        if under_way:
            raise RuntimeError(f"the gradients of chunks {under_way} are still being summed: call finish() first")

    def zero(self) -> None:
        """Forget the gradients of this step."""
        self.largest.clear()
        for bucket in self._all():
            bucket.zero()

    def pieces(self) -> list[Piece]:
        """What this rank's optimizer steps: every parameter, or its part of every bucket (ZeRO-1)."""
        rank = self.state.dp_cp.rank if self.use_distributed_optimizer else 0
        return [piece for bucket in self._all() for piece in bucket.pieces(rank)]

    def _all(self) -> list[Bucket]:
        return [bucket for buckets in self.buckets for bucket in buckets]

    def _mine(self, bucket: Bucket) -> Tensor:
        """Where a sum ends up: the whole bucket, or this rank's part."""
        return bucket.slice_of(self.state.dp_cp.rank) if self.use_distributed_optimizer else bucket.buffer

    @torch.no_grad()
    def _send_next(self, departures: _Departures) -> None:
        bucket = departures.buckets[departures.left]
        departures.left += 1
        bucket.attach()
        for (_, shard), view in zip(bucket.members, bucket.views, strict=True):
            # After the sums nobody can tell whose NaN it was.
            self.largest.append((shard, torch.linalg.vector_norm(view, torch.inf)))
        with phase("gradients"):
            if bucket.partial:
                bucket.buffer.copy_(self.state.tp.all_reduce(bucket.buffer))
            if self.state.dp_cp.size > 1:
                group = self.state.dp_cp
                send = group.reduce_scatter_async if self.use_distributed_optimizer else group.all_reduce_async
                self._under_way.append((bucket, send(bucket.buffer)))

    def _sum_tied_copies(self) -> None:
        """Both copies of a tied embedding get the sum of their gradients.

        They live on the first and the last rank of the pipeline, or both on this one (a "v" placement; several chunks on one rank).
        """
        copies = [self._mine(bucket) for bucket in self._all() if bucket.tied]
        if len(copies) == 2:
            total = copies[0] + copies[1]
        elif len(copies) == 1 and self.state.embedding is not None:
            total = self.state.embedding.all_reduce(copies[0])
        else:
            return
        for copy in copies:
            copy.copy_(total)
