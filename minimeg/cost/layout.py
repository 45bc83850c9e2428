"""A layout: how a model is laid over GPUs. ``t8 p8 d16 n3 b1 selective`` is 8-way tensor, 8-way pipeline and 16-way data parallelism, 3
chunks a rank, micro-batches of one sequence, selective recomputation.

What makes it legal is arithmetic: t divides heads and hidden, p n divides the layers, t p d is the number of GPUs, d b divides the
batch, and interleaving needs m a multiple of p (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

See it run: ``python -m minimeg.cost --model 22b --gpus 8 --explain "t8 p1 d1 n1 b4 selective"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from minimeg.cost.flops import RECOMPUTE, Recompute
from minimeg.cost.hardware import GB, GPU
from minimeg.cost.parameters import split_faults
from minimeg.cost.shapes import GPTShape
from minimeg.schedule.actions import refuse, size_faults

LARGEST_MICROBATCH = 16


@dataclass(frozen=True)
class Job:
    """What is trained, on what.

    Attributes:
        gpus: how many. batch: global batch B in sequences. tokens: T, of the whole training.
        sequence_parallel: used wherever t > 1. distributed_optimizer: ZeRO stage 1 (``megatron_bytes_per_parameter``).
        reserve: bytes of a GPU that are not ours: CUDA context, NCCL buffers, workspaces, fragmentation. An assumption.
    """

    shape: GPTShape
    gpus: int
    gpu: GPU
    batch: int
    tokens: float = 300e9
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    reserve: float = 4 * GB

    def __post_init__(self) -> None:
        faults = size_faults(gpus=self.gpus, batch=self.batch)
        if not self.tokens > 0:
            faults.append(f"tokens={self.tokens} must be above 0")
        if not 0 <= self.reserve < self.gpu.memory:
            faults.append(f"reserve={self.reserve} must be from 0 to the GPU's {self.gpu.memory:g} bytes")
        refuse(faults, "cannot plan")


@dataclass(frozen=True, order=True)
class Layout:
    """t, p, d, n, b and what is recomputed; ``str()`` and ``parse`` are each other's inverse."""

    tensor: int
    pipeline: int
    data: int
    chunks: int = 1
    microbatch: int = 1
    recompute: Recompute = "selective"

    def __str__(self) -> str:
        return f"t{self.tensor} p{self.pipeline} d{self.data} n{self.chunks} b{self.microbatch} {self.recompute}"

    @classmethod
    def parse(cls, words: str) -> Layout:
        """``"t8 p8 d16 n3 b1 selective"``, in any order; what is left out is 1, and "selective".

        Raises:
            ValueError: a word that is none of these, or one said twice.
        """
        names = {"t": "tensor", "p": "pipeline", "d": "data", "n": "chunks", "b": "microbatch"}
        sizes: dict[str, int] = {"tensor": 1, "pipeline": 1, "data": 1}
        faults: list[str] = []
        seen: list[str] = []
        recompute: Recompute = "selective"
        for word in words.replace(",", " ").split():
            number = re.fullmatch(r"([tpdnb])(\d+)", word)
            name = names[number[1]] if number else "recompute"
            if number:
                sizes[name] = int(number[2])
            elif word in RECOMPUTE:
                recompute = next(value for value in RECOMPUTE if value == word)
            else:
                faults.append(f"{word!r} is not of the form t8 p8 d16 n3 b1, nor one of {', '.join(RECOMPUTE)}")
                continue
            if name in seen:
                faults.append(f"{name} is given twice")
            seen.append(name)
        refuse(faults, f"layout {words!r}")
        return cls(**sizes, recompute=recompute)

    def microbatches(self, batch: int) -> int:
        """m = B / (d b)."""
        return batch // (self.data * self.microbatch)

    def faults(self, job: Job) -> list[str]:
        """Why this layout cannot run the job, memory apart; an empty list if it can."""
        t, p, d, n, b = self.tensor, self.pipeline, self.data, self.chunks, self.microbatch
        found = size_faults(tensor=t, pipeline=p, data=d, chunks=n, microbatch=b)
        if self.recompute not in RECOMPUTE:
            found.append(f"recompute={self.recompute!r} is unknown; use one of {', '.join(RECOMPUTE)}")
        if found:
            return found
        shape, m = job.shape, self.microbatches(job.batch)
        found += split_faults(shape, t)
        if job.sequence_parallel and shape.sequence % t:
            found.append(f"tensor={t} does not divide sequence={shape.sequence}; use sequence_parallel=False")
        if t * p * d != job.gpus:
            found.append(
                f"tensor x pipeline x data = {t * p * d} is not gpus={job.gpus}; use data={job.gpus // (t * p)}"
            )
        if shape.layers % (p * n):
            found.append(f"pipeline x chunks = {p * n} does not divide layers={shape.layers}; use a divisor")
        if job.batch % (d * b):
            found.append(f"data x microbatch = {d * b} does not divide batch={job.batch}; use a divisor")
        elif n > 1 and p == 1:
            found.append(f"chunks={n} with pipeline=1 saves nothing; use chunks=1")
        elif n > 1 and m % p:
            found.append(f"chunks={n} needs microbatches={m} to be a multiple of pipeline={p}; use chunks=1")
        return found


def legal_layouts(job: Job) -> Iterator[Layout]:
    """Every layout without faults, memory apart; micro-batches are powers of two up to 16."""
    shape = job.shape
    for t in _divisors(job.gpus):
        if split_faults(shape, t):
            continue
        for p in _divisors(job.gpus // t):
            for b in (2**k for k in range(LARGEST_MICROBATCH.bit_length())):
                for n in _divisors(shape.layers // p) if shape.layers % p == 0 else ():
                    layout = Layout(t, p, job.gpus // (t * p), n, b, "none")
                    if not layout.faults(job):
                        for recompute in RECOMPUTE:
                            yield Layout(t, p, layout.data, n, b, recompute)


def _divisors(whole: int) -> list[int]:
    return [part for part in range(1, whole + 1) if whole % part == 0]
