"""Counting communication from outside: a dispatch mode sees every c10d operation, whoever began it.

(torch's CommDebugMode fails on the second forward of a module and does not see messages.)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CommunicationCounter(TorchDispatchMode):
    """``with CommunicationCounter() as seen: ...; seen.counts["allreduce"]``. Functional and in-place collectives count alike."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.namespace, func._schema.name.split("::")[-1]
        if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and not name.startswith("wait"):
            self.counts[name.strip("_").replace("all_reduce", "allreduce")] += 1
        return func(*args, **(kwargs or {}))
