"""A model and a machine whose costs can be worked out by hand: an expert takes a second on the CPU, and so on."""

import numpy as np

from mosaic.format.spec import AttentionSpec, FeedForward, LayerSpec, Mixer, ModelSpec, MoeSpec
from mosaic.runtime.experts.trace import Trace, TraceHeader
from mosaic.runtime.hardware import Cpu, Disk, Gpu, Hardware, Memory
from mosaic.runtime.simulator.sizes import ModelSizes

GB = 10**9
EXPERT, DENSE, HEAD = GB, 2 * GB, 3 * GB
HIDDEN, TOP_K = 16, 2


def machine(gpu_gb_s: float = 10, pcie_gb_s: float = 0.5, disk_gb_s: float = 0.25, gib: float = 1000) -> Hardware:
    """The CPU reads 1 GB/s. A GPU's layer takes 1 ms, an exchange 2, a layer on the CPU 4, and a token 8."""
    memory = Memory(gib, 0, 2 * gpu_gb_s, 0.5)
    return Hardware(
        "a machine", Gpu(memory, pcie_gb_s, 1000, 2000), Memory(1000, 0, 4, 0.25), Cpu(4000, 8000), Disk(disk_gb_s)
    )


def model(layers: int = 2, experts: int = 8) -> ModelSizes:
    """Full attention that remembers nothing: it has no heads."""
    layer = LayerSpec(Mixer.FULL_ATTENTION, FeedForward.MOE)
    attention = AttentionSpec(0, 0, 0, 0, 1.0, False)
    moe = MoeSpec(experts, TOP_K, 8, 0, True)
    spec = ModelSpec("a type", HIDDEN, 10, 1 << 20, 1e-6, 0.0, False, (layer,) * layers, attention, None, moe, None)
    return ModelSizes("a model", spec, (DENSE,) * layers, HEAD, EXPERT)


def trace(experts: list[list[list[int]]], num_experts: int = 8) -> Trace:
    """Of [tokens][layers][top_k] experts."""
    choices = np.array(experts, np.uint16)
    _, layers, top_k = choices.shape
    return Trace(TraceHeader("by hand", tuple(range(layers)), num_experts, top_k, EXPERT), choices)
