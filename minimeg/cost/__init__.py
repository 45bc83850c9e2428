"""What training costs, on paper: closed-form models of the papers, and a planner that ranks layouts. Pure Python, nothing imported.

>>> from minimeg.cost import activation_bytes_per_layer, model, parameters
>>> gpt3 = model("gpt3-175b").shape
>>> parameters(gpt3)
174615822336
>>> activation_bytes_per_layer(gpt3, microbatch=1, tensor=8, sequence_parallel=True, recompute="selective")
106954752

Each function is one formula: its docstring begins with it and names paper, equation, units and assumptions, also where a paper is
inconsistent with itself. The planner: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --gpu a100-80g``.
"""

from minimeg.cost.activations import (
    activation_bytes_per_layer,
    attention_core_bytes,
    attention_core_ratio,
    best_checkpoints,
    checkpoint_footprint,
    checkpointed_every,
    extra_activation_bytes,
    first_stage_activation_bytes,
    in_flight,
    interleaving_memory_factor,
    output_tensor_bytes,
    selective_saving,
)
from minimeg.cost.bubble import (
    batch_seconds,
    bubble_of_data_parallel,
    bubble_of_ideal,
    bubble_of_total,
    bubble_seconds,
)
from minimeg.cost.collectives import collective_seconds, wire_factor
from minimeg.cost.communication import (
    cross_entropy_elements,
    data_parallel_elements,
    layer_collectives,
    model_collectives,
    pipeline_elements,
    pipeline_message_elements,
    tensor_parallel_elements,
)
from minimeg.cost.estimate import Estimate, estimate
from minimeg.cost.flops import (
    attention_core_flops,
    attention_core_share,
    flops_per_iteration,
    hardware_flops_as_published,
    hardware_flops_per_iteration,
    layer_forward_flops,
    model_flops_per_iteration,
    output_forward_flops,
    recompute_overhead,
    utilisation,
)
from minimeg.cost.hardware import GPU, GPUS, gpu
from minimeg.cost.heatmap import heat_map
from minimeg.cost.layout import Job, Layout, legal_layouts
from minimeg.cost.long_sequences import (
    context_parallel_elements,
    megatron_sequence_parallel_elements,
    ring_attention_block,
    ring_attention_bytes,
    ring_attention_sequence,
    ring_self_attention_elements,
    ulysses_elements,
    ulysses_elements_exact,
)
from minimeg.cost.optimizer import megatron_bytes_per_parameter, zero_bytes, zero_communication
from minimeg.cost.parameters import layer_parameters, matrix_parameters, parameters, rank_parameters
from minimeg.cost.planner import Plan, alternatives, plan
from minimeg.cost.shapes import MODELS, GPTShape, Model, model
from minimeg.cost.time import (
    aggregate_petaflops,
    percent_of_peak,
    scaling_efficiency,
    training_days,
    training_days_exact,
)

__all__ = [
    "GPU",
    "GPUS",
    "MODELS",
    "Estimate",
    "GPTShape",
    "Job",
    "Layout",
    "Model",
    "Plan",
    "activation_bytes_per_layer",
    "aggregate_petaflops",
    "alternatives",
    "attention_core_bytes",
    "attention_core_flops",
    "attention_core_ratio",
    "attention_core_share",
    "batch_seconds",
    "best_checkpoints",
    "bubble_of_data_parallel",
    "bubble_of_ideal",
    "bubble_of_total",
    "bubble_seconds",
    "checkpoint_footprint",
    "checkpointed_every",
    "collective_seconds",
    "context_parallel_elements",
    "cross_entropy_elements",
    "data_parallel_elements",
    "estimate",
    "extra_activation_bytes",
    "first_stage_activation_bytes",
    "flops_per_iteration",
    "gpu",
    "hardware_flops_as_published",
    "hardware_flops_per_iteration",
    "heat_map",
    "in_flight",
    "interleaving_memory_factor",
    "layer_collectives",
    "layer_forward_flops",
    "layer_parameters",
    "legal_layouts",
    "matrix_parameters",
    "megatron_bytes_per_parameter",
    "megatron_sequence_parallel_elements",
    "model",
    "model_collectives",
    "model_flops_per_iteration",
    "output_forward_flops",
    "output_tensor_bytes",
    "parameters",
    "percent_of_peak",
    "pipeline_elements",
    "pipeline_message_elements",
    "plan",
    "rank_parameters",
    "recompute_overhead",
    "ring_attention_block",
    "ring_attention_bytes",
    "ring_attention_sequence",
    "ring_self_attention_elements",
    "scaling_efficiency",
    "selective_saving",
    "tensor_parallel_elements",
    "training_days",
    "training_days_exact",
    "ulysses_elements",
    "ulysses_elements_exact",
    "utilisation",
    "wire_factor",
    "zero_bytes",
    "zero_communication",
]
