"""Group: the only door to ``torch.distributed``. Every collective and every message of minimeg goes through this file.

Four promises, each of which plain ``torch.distributed`` breaks for somebody:

* **The caller's tensor is never changed**; every operation returns a new tensor. (In-place all-reduces corrupt ``g(h) + h``.)
* **Strided views are right.** gloo's all-reduce of a column slice silently overwrites its neighbours in memory.
* **What arrives is what was expected.** gloo fills a receive of another dtype or size with garbage, or aborts the process.
* **A failure explains itself**: the rank's coordinates, the operation, and the last 64 operations before it.

A group of one rank communicates nothing. Positions (``src``, ``dst``) count inside the group; translating them to global ranks
happens here and nowhere else (Megatron-LM issue 620: a message sent by global rank over the wrong group).

See it run: ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.groups``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from minimeg.ledger import RECORDER, Entry, Ledger, ledger, phase
from minimeg.signature import Mailboxes, difference, packed, signature, wire_tag

__all__ = ["CommunicationError", "Group", "Ledger", "Pending", "ledger", "phase"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renames the collectives on one tensor and deprecates the old names; pyproject.toml allows torch 2.10.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CommunicationError(RuntimeError):
    """An operation failed or timed out. The message holds the rank's coordinates and its last operations."""


@dataclass
class Pending:
    """An operation under way. ``wait()`` blocks until it is done and returns its tensor; a second call returns it again."""

    _finish: Callable[[], Tensor] | None
    _result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        assert self._result is not None
        return self._result


@dataclass(eq=False)
class Group:
    """A set of ranks that talk to each other, as one of them sees it.

    Args:
        ranks: global ranks, ascending (torch sorts them, so position and order must agree).
        rank: this process's position in ``ranks``.
        name: the axis, e.g. ``"tp"``; appears in ledger and errors.
        handle: the ``torch.distributed`` process group; None for a group of one rank.
        stage_through_host: copy GPU tensors to host memory and back (gloo, when ranks share a GPU).
        coordinates: this rank's place in the grid, for messages, e.g. ``"tp=1 dp=0 pp=2"``.
        duplex: messages to and from a rank do not wait for each other (gloo); NCCL completes them in the order of issue.
        store: a TCPStore through which both ends of a message compare dtype and shape; None: not compared.
    """

    ranks: tuple[int, ...]
    rank: int
    name: str
    handle: dist.ProcessGroup | None = None
    stage_through_host: bool = False
    coordinates: str = ""
    duplex: bool = False
    store: Store | None = field(default=None, repr=False)
    _mailboxes: Mailboxes = field(default_factory=Mailboxes, init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a connection cannot be copied; a copied layer talks through the same one

    @property
    def size(self) -> int:
        return len(self.ranks)

    # ---- collectives: every rank of the group calls them in the same order -------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Element by element "sum", "max" or "min" over the ranks. [...] -> [...], the same on every rank."""
        return self.all_reduce_async(x, op).wait()

    def all_reduce_async(self, x: Tensor, op: str = "sum") -> Pending:
        """Like :meth:`all_reduce`, but returns at once; compute something else before ``.wait()``."""
        if op not in _REDUCTIONS:
            raise ValueError(f"op must be one of {', '.join(map(repr, _REDUCTIONS))}, got {op!r}")
        buffer = self._private_copy(x)
        if self.size == 1:
            return Pending(None, buffer)
        with self._watch("all_reduce", x, _bytes(x), op) as entry:
            work = dist.all_reduce(buffer, _REDUCTIONS[op], group=self.handle, async_op=True)
        return self._pending(entry, work, lambda: buffer.to(x.device))

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors, of equal shapes, joined along ``dim`` in rank order. [n, ...] -> [t n, ...]."""
        if self.size == 1:
            return self._private_copy(x).view(x.shape or (1,))
        piece = self._send_buffer(x)
        gathered = piece.new_empty((self.size, *piece.shape))
        with self._watch("all_gather", x, self.size * _bytes(x)) as entry:
            # Flat views: torch checks that the output is the input's first dimension times t, which 0-d tensors lack.
            _all_gather_single(gathered.view(-1), piece.view(-1), group=self.handle)
            RECORDER.finish(entry)
        return torch.cat(tuple(gathered), dim).to(x.device) if x.dim() else gathered.to(x.device)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's slice along ``dim`` of the sum over the ranks. [t n, ...] -> [n, ...].

        On gloo it is an all-to-all and a local sum: gloo's own reduce-scatter takes 2 to 3 times as long.
        """
        return self.reduce_scatter_async(x, dim).wait()

    def reduce_scatter_async(self, x: Tensor, dim: int = 0) -> Pending:
        """Like :meth:`reduce_scatter`, but returns at once."""
        self._check_divisible(x, dim, "reduce_scatter")
        if self.size == 1:
            return Pending(None, self._private_copy(x))
        slices = self._send_buffer(torch.stack(self._detached(x).chunk(self.size, dim)))  # [t, ..., n, ...]
        nccl = dist.get_backend(self.handle) == "nccl"
        received = slices.new_empty(slices.shape[1:] if nccl else slices.shape)
        with self._watch("reduce_scatter", x, _bytes(x)) as entry:
            if nccl:
                work = _reduce_scatter_single(received.view(-1), slices.view(-1), group=self.handle, async_op=True)
            else:
                work = dist.all_to_all_single(received, slices, group=self.handle, async_op=True)

        def result() -> Tensor:
            return (received if nccl else received.sum(0, dtype=x.dtype)).to(x.device)

        return self._pending(entry, work, result)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Cut ``x`` along ``split_dim``, give piece j to rank j, join what arrives along ``concat_dim``.

        Dimension ``split_dim`` shrinks by t and ``concat_dim`` grows by t; it is its own inverse with the two exchanged.
        """
        self._check_divisible(x, split_dim, "all_to_all")
        if self.size == 1:
            return self._private_copy(x)
        pieces = self._send_buffer(torch.stack(self._detached(x).chunk(self.size, split_dim)))
        received = torch.empty_like(pieces)
        with self._watch("all_to_all", x, _bytes(x)) as entry:
            dist.all_to_all_single(received, pieces, group=self.handle)
            RECORDER.finish(entry)
        return torch.cat(tuple(received), concat_dim).to(x.device)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The tensor of position ``src``, on every rank. All give a tensor of that shape; the others' values are ignored."""
        self._check_position("src", src)
        buffer = self._private_copy(x)
        if self.size == 1:
            return buffer
        with self._watch("broadcast", x, _bytes(x), f"from {src}") as entry:
            dist.broadcast(buffer, self.ranks[src], group=self.handle)
            RECORDER.finish(entry)
        return buffer.to(x.device)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Each rank's ``value`` (anything JSON can hold), in rank order, on every rank. No pickle: nothing received is run."""
        encoded = json.dumps(value)
        if self.size == 1:
            return [json.loads(encoded)]
        # A dry run: nobody answers, so the others are taken to say the same.
        if dist.get_backend(self.handle) == "fake":
            return [json.loads(encoded) for _ in self.ranks]
        device = "cuda" if dist.get_backend(self.handle) == "nccl" else "cpu"
        text = torch.tensor(list(encoded.encode()), dtype=torch.uint8, device=device)
        lengths = self.all_gather(torch.tensor([len(text)], device=device)).tolist()
        padded = torch.nn.functional.pad(text, (0, max(lengths) - len(text)))
        texts = self.all_gather(padded).view(self.size, -1).cpu()
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(texts, lengths, strict=True)]

    # ---- messages: between two ranks ---------------------------------------------------------------------------------------

    def isend(self, x: Tensor, dst: int, tag: int = 0) -> Pending:
        """Begin to send ``x`` to position ``dst``. ``wait()`` returns what was sent, once the other side has taken it.

        Do not change ``x`` before that. On gloo nothing moves until the other side has posted its receive, at any size: a
        blocking send before a receive on both sides hangs there, where NCCL may hide the mistake.
        """
        self._check_peer("dst", dst)
        message, on_the_wire = self._send_buffer(x), wire_tag(x.shape, x.dtype, tag)
        with self._watch("send", x, _bytes(x), f"to {dst} tag {tag}") as entry:
            if self.store is not None:
                self.store.queue_push(self._mailbox(self.rank, dst, tag), signature(x.shape, x.dtype))
            work = dist.isend(message, self.ranks[dst], group=self.handle, tag=on_the_wire)
        return self._pending(entry, work, lambda: message)

    def irecv(
        self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int = 0, device: torch.device | None = None
    ) -> Pending:
        """Begin to receive a tensor of ``shape`` and ``dtype`` from position ``src``. ``wait()`` returns it.

        Raises CommunicationError from ``wait()``, naming both sides, if the sender sent another shape or dtype.
        """
        self._check_peer("src", src)
        expected, on_the_wire = signature(shape, dtype), wire_tag(shape, dtype, tag)
        target = torch.device("cpu") if device is None else device
        buffer = torch.empty(tuple(shape), dtype=dtype, device="cpu" if self.stage_through_host else target)
        with self._watch("recv", buffer, _bytes(buffer), f"from {src} tag {tag}") as entry:
            work = dist.irecv(buffer, self.ranks[src], group=self.handle, tag=on_the_wire)
        if self.store is None:
            return self._pending(entry, work, lambda: buffer.to(target))
        announced = self._mailboxes.next(self.store, self._mailbox(src, self.rank, tag))

        def compare() -> None:
            if (sent := announced()) != expected:
                raise RuntimeError(f"position {src} of {self.name} sent {sent}, but {expected} was expected")

        return self._pending(entry, work, lambda: buffer.to(target), before=compare)

    @contextmanager
    def agreed(self, sends: Mapping[int, Sequence[str]], receives: Mapping[int, Sequence[str]]) -> Iterator[None]:
        """Compare the signatures of many messages at once; those sent inside the ``with`` are then not compared one by one.

        ``sends`` and ``receives``: by position, the signatures of all that will go there, or is expected from there, in order.
        Raises CommunicationError, which names both sides, where they see a message differently; none has been sent then.
        """
        store, self.store = self.store, None
        try:
            if store is not None:
                for peer, mine in sends.items():
                    store.queue_push(self._mailbox(self.rank, peer, "all"), packed(mine))
                for peer, expected in receives.items():
                    announced = self._mailboxes.next(store, self._mailbox(peer, self.rank, "all"))
                    try:
                        if fault := difference(announced(), expected):
                            raise RuntimeError(f"position {peer} of {self.name} will send {fault}")
                    except RuntimeError as error:
                        raise self._failure(f"messages from {peer}", error) from error
            yield
        finally:
            self.store = store

    # ---- how the promises are kept -----------------------------------------------------------------------------------------

    def _detached(self, x: Tensor) -> Tensor:
        if x.grad_fn is not None and torch.is_grad_enabled():
            raise ValueError(
                f"{self.name}: a Group does not differentiate, so the gradient of this tensor ({x.grad_fn.name()}) would be "
                "lost; use minimeg.mappings inside a model, or pass x.detach()"
            )
        return x.detach()

    def _send_buffer(self, x: Tensor) -> Tensor:
        """``x`` without its history, contiguous, on the device that communicates. May share memory with ``x``: read only."""
        x = self._detached(x).contiguous()
        return x.cpu() if self.stage_through_host else x

    def _private_copy(self, x: Tensor) -> Tensor:
        buffer = self._send_buffer(x)
        return buffer.clone() if buffer.data_ptr() == x.data_ptr() else buffer

    @contextmanager
    def _watch(self, op: str, x: Tensor, payload: int, note: str = "") -> Iterator[Entry]:
        """Log the operation; turn a failure inside into a CommunicationError that tells the whole story."""
        if self.handle is None:  # torch would take None for the group of all ranks
            raise ValueError(f"{self.name} {list(self.ranks)} has no process group: its ParallelState was destroyed")
        entry = RECORDER.start(op, self.name, f"{signature(x.shape, x.dtype)} {note}".rstrip(), payload, self.size)
        try:
            yield entry
        except RuntimeError as error:
            raise self._failure(f"{op} {entry.what}", error) from error

    def _failure(self, what: str, error: RuntimeError) -> CommunicationError:
        return CommunicationError(
            f"rank {self.ranks[self.rank]} ({self.coordinates or 'no grid'}): {what} over {self.name} "
            f"{list(self.ranks)} failed: {error}\nThe last operations of this rank:\n{RECORDER}"
        )

    def _pending(
        self, entry: Entry, work: Any, result: Callable[[], Tensor], before: Callable[[], None] | None = None
    ) -> Pending:
        def finish() -> Tensor:
            try:
                if before is not None:
                    before()
                work.wait()
                RECORDER.finish(entry)
                return result()
            except RuntimeError as error:
                raise self._failure(f"{entry.op} {entry.what}", error) from error

        return Pending(finish)

    def _mailbox(self, src: int, dst: int, tag: int | str) -> str:
        return f"minimeg/{self.ranks[src]}>{self.ranks[dst]}/{self.name}/{tag}"

    def _check_position(self, field: str, position: int) -> None:
        if not 0 <= position < self.size:
            raise ValueError(f"{field} is a position in the group {self.name} of {self.size} ranks, got {position}")

    def _check_peer(self, field: str, position: int) -> None:
        self._check_position(field, position)
        if position == self.rank:
            raise ValueError(f"{field}={position} is this rank itself; hand the tensor over in memory")

    def _check_divisible(self, x: Tensor, dim: int, op: str) -> None:
        if x.dim() == 0 or x.shape[dim] % self.size:
            what = f"{op} over {self.name}: dimension {dim} of shape {list(x.shape)}"
            raise ValueError(f"{what} must be a multiple of the group's {self.size} ranks")


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
