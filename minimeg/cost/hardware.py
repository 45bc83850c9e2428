"""What a GPU can do: the numbers behind every estimate of time, with their sources, all of them parameters.

Bandwidths are those of ONE direction. Two advertised numbers mislead: NVLink's 600 GB/s (A100) and 900 (H100) are both directions
together, and 1979 TFLOP/s of an H100 needs sparse matrices (dense bf16: 989).

Two efficiencies, of matrix products and of memory, turn data sheets into speeds. They are round numbers near the best fit to the ten
times of Korthikanti et al. 2022 (arXiv 2205.05198), Table 4: one layer on eight A100s. ``minimeg.cost.step`` says how well they predict
whole iterations. For other GPUs the same parts are assumed.

See them: ``python -m minimeg.cost --list``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minimeg.schedule.actions import refuse

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """A GPU in a cluster of nodes of eight.

    Attributes:
        name: as on the command line.
        peak: dense bf16 FLOP/s of the data sheet; what utilisation is measured against.
        matmul: FLOP/s that the best large matrix product reached in a benchmark (S. Bekman, Machine Learning Engineering).
        memory: bytes.
        memory_bandwidth: bytes/s.
        nvlink: bytes/s to the other GPUs of the node.
        adapter: bytes/s of the GPU's own network adapter.
        matmul_efficiency: part of ``matmul`` that a transformer's products reach.
        memory_efficiency: part of ``memory_bandwidth`` that norms, dropout, GELU and softmax reach.
        link_efficiency: part of a link that collectives reach; 235 of 300 GB/s measured on A100s is 0.78.
        adapters_per_ring: at most so many adapters carry one group's ring out of a node. 4: half of a node's eight, 100 GB/s on A100s;
            the ranking of Narayanan et al. 2021, Figure 13, needs 4 or fewer (see ``minimeg.cost.minimal``).
        gpus_per_node: GPUs joined by NVLink.
        note: where the numbers come from, or that they are assumed.
    """

    name: str
    peak: float
    matmul: float
    memory: float
    memory_bandwidth: float
    nvlink: float
    adapter: float
    matmul_efficiency: float = 0.8
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    adapters_per_ring: int = 4
    gpus_per_node: int = 8
    note: str = ""

    def __post_init__(self) -> None:
        numbers = {key: value for key, value in vars(self).items() if key not in ("name", "note")}
        faults = [f"{key}={value} must be above 0" for key, value in numbers.items() if not value > 0]
        faults += [
            f"{key}={value} must be at most 1"
            for key, value in numbers.items()
            if key.endswith("efficiency") and value > 1
        ]
        refuse(faults, f"GPU {self.name}")

    def ring_bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes/s at which a group's ring runs: NVLink if it fits a node, else the adapters that its members in one node can share.

        Args:
            ranks: of the group. stride: between neighbours, in global ranks: in the order tp-dp-pp 1 for tp, t for dp, t d for pp.
        """
        if ranks * stride <= self.gpus_per_node:
            return self.nvlink * self.link_efficiency
        together = max(1, self.gpus_per_node // stride)  # members in one node, each beside an adapter of its own
        return min(self.nvlink, min(together, self.adapters_per_ring) * self.adapter) * self.link_efficiency

    def message_bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes/s of a message between neighbours of a pipeline, at its slowest hop: NVLink if all fit a node, else one adapter."""
        inside = ranks * stride <= self.gpus_per_node
        return (self.nvlink if inside else min(self.nvlink, self.adapter)) * self.link_efficiency


_DGX_A100 = "data sheet; DGX A100, 8 x HDR 200 Gb/s"

A100 = GPU("a100-80g", 312e12, 271.2e12, 80 * GB, 2.0e12, 300 * GB, 25 * GB, note=_DGX_A100)
H100 = GPU(
    "h100-80g", 989e12, 794.5e12, 80 * GB, 3.35e12, 450 * GB, 50 * GB, note="data sheet; DGX H100, 8 x NDR 400 Gb/s"
)
GPUS = {
    one.name: one
    for one in (
        A100,
        replace(A100, name="a100-40g", memory=40 * GB, memory_bandwidth=1.555e12),
        H100,
        replace(
            H100,
            name="h200-141g",
            memory=141 * GB,
            memory_bandwidth=4.8e12,
            note="data sheet; DGX H200 as H100; 396.4 of 450 GB/s measured between two",
        ),
        replace(
            H100,
            name="h800-80g",
            nvlink=200 * GB,
            note="an H100 with 200 GB/s of NVLink, of which DeepSeek-V3's report counts on 160",
        ),
        GPU(
            "b200-180g",
            2250e12,
            2250e12 * H100.matmul / H100.peak,
            180 * GB,
            8.0e12,
            900 * GB,
            50 * GB,
            note="data sheet; its products are assumed to reach the H100's part of peak",
        ),
    )
}


def gpu(name: str) -> GPU:
    """A GPU by name.

    Raises:
        ValueError: an unknown name.
    """
    refuse([] if name.lower() in GPUS else [f"{name!r} is unknown; use one of {', '.join(GPUS)}"], "gpu")
    return GPUS[name.lower()]
