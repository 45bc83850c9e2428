"""How long does a stage compute and talk? The seconds of one micro-batch on one stage, which a simulated schedule then lines up.

    matrix products    FLOPs / t / speed of products      Narayanan et al. 2021 (arXiv 2104.04473), appendix
    elementwise        bytes read and written / memory bandwidth: norms, dropout, residual sums, GELU, softmax (``elementwise_bytes``)
    tensor             collectives over the tensor-parallel group, none of it hidden (``minimeg.cost.communication``)

Once per step come the gradients' reduction, the tied embedding's and the optimizer, nothing of it hidden either: an upper bound.

How good is it? Two efficiencies (``minimeg.cost.hardware``) come from one layer on 8 GPUs, Korthikanti et al. 2022 (arXiv 2205.05198),
Table 4; not from whole iterations. ``tests/cost/test_step.py`` holds 25 published iterations on 8 to 3072 A100s against the estimate:

    Korthikanti et al. 2022, Table 5 and its 2240 GPUs    9 times of an iteration          0.94 to 1.09 of the measured
    Narayanan et al. 2021, Table 2, PTD                   6 speeds, 384 to 2240 GPUs       0.99 to 1.05
    Narayanan et al. 2021, Table 1                       10 speeds, 32 to 3072 GPUs        0.93 to 1.03

The paper does not say which micro-batch and how many chunks its Table 1 used, nor Table 2 the chunks: 1 is assumed.

See it run: ``python -m minimeg.cost --model 22b --gpus 8 --explain "t8 p1 d1 n1 b4 selective"``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from minimeg.cost.collectives import collective_seconds
from minimeg.cost.communication import model_collectives, pipeline_message_elements
from minimeg.cost.flops import attention_core_flops, layer_forward_flops, output_forward_flops
from minimeg.cost.layout import Job, Layout
from minimeg.cost.memory import Term
from minimeg.cost.parameters import rank_parameters
from minimeg.cost.shapes import GPTShape


@dataclass(frozen=True)
class Work:
    """Seconds by what they are spent on."""

    matmul: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, f.name) for f in fields(self)))

    @property
    def seconds(self) -> float:
        return self.matmul + self.elementwise + self.tensor


@dataclass(frozen=True)
class StageWork:
    """One micro-batch on one stage: forward, backward, and what backward computes again."""

    forward: Work
    backward: Work
    again: Work

    @property
    def forward_seconds(self) -> float:
        return self.forward.seconds

    @property
    def backward_seconds(self) -> float:
        return self.backward.seconds + self.again.seconds

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def attention_elementwise_bytes(shape: GPTShape, microbatch: int, tensor: int) -> int:
    """9 a s^2 b / t: softmax reads 2 and writes 2 bytes; its dropout reads 2, writes 2 and a mask of 1. Derived; unfused, 16 bits."""
    return 9 * shape.heads * shape.sequence**2 * microbatch // tensor


def elementwise_bytes(shape: GPTShape, microbatch: int, tensor: int, sequence_parallel: bool) -> int:
    """22 sbh (/t with sequence parallelism) + 16 sbh/t + 9as^2b/t: bytes that one layer's forward pass moves outside its products.

    Derived, in 16 bits, each a kernel of its own: two norms, read 2 and write 2 each (8); two sums of dropout and residual, read 4,
    write 2 and a mask of 1 (14); GELU on 4h, read 2 and write 2 (16/t); softmax and its dropout (``attention_elementwise_bytes``).
    """
    sbh = shape.sequence * microbatch * shape.hidden
    outside = 22 * sbh // tensor if sequence_parallel else 22 * sbh
    return outside + 16 * sbh // tensor + attention_elementwise_bytes(shape, microbatch, tensor)


def layer_work(job: Job, layout: Layout) -> StageWork:
    """One layer. Backward is twice the forward's products and traffic, and as many collectives.

    Sequence parallelism's second gather in backward is taken to be hidden behind the weight gradient (Korthikanti et al. 2022, 4.2.2).
    """
    shape, gpu, t, b = job.shape, job.gpu, layout.tensor, layout.microbatch
    products, traffic = gpu.matmul * gpu.matmul_efficiency * t, gpu.memory_bandwidth * gpu.memory_efficiency
    moved = elementwise_bytes(shape, b, t, job.sequence_parallel)
    exchange = 2 * tensor_seconds(job, layout)
    once = Work(layer_forward_flops(shape, b) / products, moved / traffic, exchange)
    core = Work(attention_core_flops(shape, b) / products, attention_elementwise_bytes(shape, b, t) / traffic)
    again = {"none": Work(), "selective": core, "full": once}[layout.recompute]
    return StageWork(once, Work(2 * once.matmul, 2 * once.elementwise, exchange), again)


def output_work(job: Job, layout: Layout) -> StageWork:
    """The output layer and the loss: 2bshv/t FLOPs forward, twice that backward; 32-bit logits are written, read, and read again."""
    shape, gpu, t, b = job.shape, job.gpu, layout.tensor, layout.microbatch
    products = output_forward_flops(shape, b) / (gpu.matmul * gpu.matmul_efficiency * t)
    logits = 4 * shape.sequence * b * shape.vocabulary / t / (gpu.memory_bandwidth * gpu.memory_efficiency)
    exchange = model_collectives()["output"] * tensor_seconds(job, layout)
    return StageWork(Work(products, 3 * logits), Work(2 * products, 2 * logits, exchange), Work())


def stage_work(job: Job, layout: Layout, stage: int) -> StageWork:
    """L/p layers, the embedding's all-reduce on the first stage, output layer and loss on the last."""
    one, deep = layer_work(job, layout), job.shape.layers // layout.pipeline
    forward, backward, again = one.forward * deep, one.backward * deep, one.again * deep
    if stage == 0:
        forward += Work(tensor=model_collectives()["embedding"] * tensor_seconds(job, layout))
    if stage == layout.pipeline - 1:
        output = output_work(job, layout)
        forward, backward = forward + output.forward, backward + output.backward
    return StageWork(forward, backward, again)


def tensor_seconds(job: Job, layout: Layout) -> float:
    """An all-reduce of [s, b, h] in 16 bits over the tensor-parallel group; all-gather and reduce-scatter take as long together."""
    size = 2 * job.shape.sequence * layout.microbatch * job.shape.hidden
    return collective_seconds("all_reduce", size, layout.tensor, job.gpu.ring_bandwidth(layout.tensor, 1))


def message_seconds(job: Job, layout: Layout) -> float:
    """One message between stages: bsh/t in 16 bits, each tensor-parallel rank sending its part. Narayanan et al. 2021, section 4.1."""
    elements = pipeline_message_elements(job.shape, layout.microbatch, layout.tensor)
    return 2 * elements / job.gpu.message_bandwidth(layout.pipeline, layout.tensor * layout.data)


def once_per_step(job: Job, layout: Layout) -> list[Term]:
    """Seconds after the last backward, of a rank of the first stage: gradients over d, tied embedding, optimizer. All derived.

    Gradients have 4 bytes. The distributed optimizer reduce-scatters them, updates P/d parameters and all-gathers weights of 2 bytes;
    without it they are all-reduced and each rank updates all. An update reads and writes the 32-bit weight and two moments (24), reads
    the gradient (4) and writes the weight (2).
    """
    gpu, t, p, d = job.gpu, layout.tensor, layout.pipeline, layout.data
    held = rank_parameters(job.shape, t, p, 0)
    ring = gpu.ring_bandwidth(d, t)
    if job.distributed_optimizer:
        reduced = collective_seconds("reduce_scatter", 4 * held, d, ring)
        reduced += collective_seconds("all_gather", 2 * held, d, ring)
        words, updated = f"(d-1)/d {held:,} parameters x (4 + 2) bytes", held / d
    else:
        reduced = collective_seconds("all_reduce", 4 * held, d, ring)
        words, updated = f"2(d-1)/d {held:,} parameters x 4 bytes", float(held)
    terms = [Term("gradients (dp)", f"{words} at {ring / 1e9:.4g} GB/s", reduced)]
    if p > 1:
        rows, link = -(-job.shape.vocabulary // t), gpu.message_bandwidth(p, t * d)
        tied = collective_seconds("all_reduce", 4 * rows * job.shape.hidden, 2, link)
        terms.append(Term("tied embedding", f"{rows:,} rows of 4h bytes, both ends", tied))
    update = 30 * updated / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return [*terms, Term("optimizer", f"{updated:,.0f} parameters x 30 bytes from memory", update)]
