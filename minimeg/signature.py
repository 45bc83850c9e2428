"""What is on its way? The sender of a message says its dtype and shape, so that the receiver need not believe what it expects.

gloo fills a receive of another dtype with garbage and aborts the process when a message is too long. Two things prevent that:

* part of the signature goes into the message's tag, so that a pair that does not fit never meets;
* the signature itself goes through the rendezvous' store, so that the receiver can name both sides. Where all messages are known
  beforehand, as in a pipeline, theirs are compared at once (``Group.agreed``): asking the store takes some 40 us, a message 100.

See it run: ``tests/test_comm.py``, and the third experiment of ``notebooks/06_pipelines.ipynb``.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby, zip_longest

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_DIGEST_BITS = 10


def signature(shape: Sequence[int], dtype: torch.dtype) -> str:
    """E.g. ``"float32[64, 2, 16]"``."""
    return _spelled(tuple(shape), dtype)[0]


@lru_cache(maxsize=256)
def _spelled(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, int]:
    """A signature and its digest, as a message's tag holds it. A run has few of them, but needs them several times a message."""
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return text, int.from_bytes(digest, "big") >> (32 - _DIGEST_BITS)


def wire_tag(shape: Sequence[int], dtype: torch.dtype, tag: int) -> int:
    """The tag that gloo sees. A receive of another signature is never matched, so that the comparison gets the time to name both
    sides. NCCL ignores tags."""
    if not 0 <= tag < 1 << (31 - _DIGEST_BITS):
        raise ValueError(f"tag must lie in 0..{(1 << (31 - _DIGEST_BITS)) - 1}, got {tag}")
    return tag << _DIGEST_BITS | _spelled(tuple(shape), dtype)[1]


def packed(signatures: Sequence[str]) -> str:
    """One text of many signatures; equal ones in a row, as all micro-batches of one length make, count once."""
    return json.dumps([[len(list(same)), text] for text, same in groupby(signatures)])


def difference(sent: str, expected: Sequence[str]) -> str | None:
    """The first message that the sender, whose text this is, sees otherwise than the receiver, in words; None: there is none."""
    theirs = [text for count, text in json.loads(sent) for _ in range(count)]
    for number, (mine, wanted) in enumerate(zip_longest(theirs, expected, fillvalue="nothing")):
        if mine != wanted:
            return f"{mine} as message {number} of {len(theirs)}, but {wanted} was expected"
    return None


class Mailboxes:
    """The receiver's view of the signatures that are still to come, one queue a (sender, receiver, group, tag)."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._posted: dict[str, deque[list[str]]] = {}

    def next(self, store: Store, mailbox: str) -> Callable[[], str]:
        """What the sender will say of the receive that is posted now. Signatures come in the order of the sends, but receives may
        be waited for in any order: whoever waits first also fetches for the receives posted before it."""
        if self._store is not store:
            # Groups formed again after an error: what was posted before will not come.
            self._store, self._posted = store, {}
        queue, mine = self._posted.setdefault(mailbox, deque()), list[str]()
        queue.append(mine)

        def fetch() -> str:
            while not mine:
                queue.popleft().append(_pop(store, mailbox))
            return mine[0]

        return fetch


def _pop(store: Store, mailbox: str) -> str:
    """The next text in a mailbox. On a busy machine the store now and then wakes a client for nothing (torch 2.13: "queue is empty",
    about one wait in ten thousand); then it waits again."""
    for _ in range(100):
        try:
            return store.queue_pop(mailbox).decode()
        except dist.QueueEmptyError:
            continue
    raise RuntimeError(f"the rendezvous' store wakes this rank again and again, but {mailbox} is empty")
