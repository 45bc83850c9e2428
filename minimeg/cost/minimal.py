"""Which layout is faster? The smallest model that ranks layouts as Narayanan et al. 2021 (arXiv 2104.04473) measured them.

    T = (m + p - 1)(compute + tensor + pipeline) + data

One multiplication for the pipeline, one bandwidth a link, nothing overlaps, full recomputation. It reproduces the orders of three
figures: 13 (tensor against pipeline: t up to one node, then p: "Takeaway #1"), 14 (pipeline against data: throughput falls as p
rises) and 15's step at the node's border. It does not say which micro-batch is best (Figures 8 and 16 need measured times), nor that
throughput falls with t at every batch size in Figure 15: at B = 32 the gradient all-reduce weighs more.

The planner (``minimeg.cost.planner``) is the larger model: simulated schedule, memory, unequal stages.

See it run: ``python -m pytest tests/cost/test_minimal.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimeg.cost.communication import data_parallel_elements, pipeline_message_elements, tensor_parallel_elements
from minimeg.cost.flops import layer_forward_flops
from minimeg.cost.parameters import matrix_parameters
from minimeg.cost.shapes import GPTShape
from minimeg.schedule.actions import refuse, size_faults


@dataclass(frozen=True)
class Cluster:
    """Speeds of the minimal model, of the A100s of Narayanan et al. 2021; bytes/s in one direction.

    Attributes:
        flops: FLOP/s that computation reaches: half of 312e12.
        inside: all-reduce within a node: 0.8 of NVLink's 300 GB/s.
        between: all-reduce of a tensor-parallel group that spans nodes. The ranking hangs on it: up to 100 GB/s Figure 13's best is
            t = 8; at 200 GB/s, one ring using all eight 25 GB/s adapters perfectly, t = 16 wins at B = 32.
        adapter: one GPU's network adapter; pipeline messages use it.
        data: all-reduce of the gradients. Figure 14's order needs 50 GB/s or more; at 25 the all-reduce over d = 32 dominates.
        gpus_per_node: beyond it tensor parallelism leaves the node.
    """

    flops: float = 312e12 * 0.5
    inside: float = 240e9
    between: float = 100e9
    adapter: float = 25e9
    data: float = 100e9
    gpus_per_node: int = 8


A100_CLUSTER = Cluster()


def iteration_seconds(
    shape: GPTShape,
    tensor: int,
    pipeline: int,
    data: int,
    batch: int,
    microbatch: int = 1,
    cluster: Cluster = A100_CLUSTER,
) -> float:
    """T = (m+p-1)(4 (24bsh^2 + 4bs^2h)(L/p)/t/flops + 12 bsh (t-1)/t 2 (L/p)/BW + 4 bsh/t'/adapter) + 2(d-1)/d 12Lh^2/(pt) 2/BW_d.

    Every term as in sections 3.2 and 4.1 of Narayanan et al. 2021, in 16 bits; t' = min(t, GPUs of a node): so many ranks each send
    their part of a message (scatter/gather); no message if p = 1. Output layer and embeddings are left out, L/p need not be whole.

    Raises:
        ValueError: sizes below 1, micro-batches that do not divide the batch.
    """
    faults = size_faults(tensor=tensor, pipeline=pipeline, data=data, batch=batch, microbatch=microbatch)
    if not faults and batch % (data * microbatch):
        faults.append(f"batch={batch} is not a multiple of data x microbatch = {data * microbatch}; use a multiple")
    refuse(faults, "no such layout")
    m, layers = batch // (data * microbatch), shape.layers / pipeline
    compute = 4 * layer_forward_flops(shape, microbatch) * layers / tensor / cluster.flops
    link = cluster.inside if tensor <= cluster.gpus_per_node else cluster.between
    exchanged = 2 * layers * float(tensor_parallel_elements(shape, microbatch, tensor, recompute="full")) / link
    senders = min(tensor, cluster.gpus_per_node)
    message = 2 * pipeline_message_elements(shape, microbatch) / senders / cluster.adapter
    messages = 2 * message if pipeline > 1 else 0.0
    reduced = 2 * data_parallel_elements(matrix_parameters(shape) / (pipeline * tensor), data) / cluster.data
    return (m + pipeline - 1) * (compute + exchanged + messages) + reduced
