"""What a decoder layer costs in seconds, for one token. Arithmetic over a hardware profile; decides nothing.

    layer  = dense part (where it lies) + experts + overheads
    experts = the longer of  GPU: those in VRAM, one after another
                             CPU: all others, or, if later, the last one that is read and then computed
    token  = its layers + head + what the CPU does once

Weights take their bytes over the rate at which kernels read them: a vector leaves nothing else to wait for. Reads from
the disk go on beside the CPU's work. Copies to VRAM are beside everything, one after another. Left out: what copies
and reads take of the RAM's bandwidth, the shared expert beside the cold ones, drafts, other sequences.
"""

from collections import defaultdict
from typing import NamedTuple

from mosaic.runtime.hardware import Hardware
from mosaic.runtime.simulator.budget import Budget
from mosaic.runtime.simulator.sizes import FLOAT, ModelSizes

#: Where the time of a token goes, in the order in which it is told.
PARTS = ("dense, GPU", "dense, CPU", "experts, GPU", "experts, CPU", "waiting for the disk", "calls and exchanges")
DENSE_GPU, DENSE_CPU, EXPERTS_GPU, EXPERTS_CPU, WAITING, CALLS = PARTS

Spent = defaultdict[str, float]  # seconds by part


class Call(NamedTuple):
    """The experts of one layer for one token: in VRAM; not there; of these, not in RAM either; copies begun."""

    hot: int
    cold: int
    missing: int
    promoted: int


class Costs:
    """Of one machine, model and budget. Seconds of one expert: `gpu`, `cpu` to compute, `disk` to read, `copy`."""

    def __init__(self, hardware: Hardware, sizes: ModelSizes, budget: Budget) -> None:
        self._hardware, self._sizes, self._budget = hardware, sizes, budget
        gpu = hardware.gpu
        self._gpu_rate = gpu.memory.rate if gpu else 0.0
        self.gpu = sizes.expert / gpu.memory.rate if gpu else 0.0
        self.copy = sizes.expert / (gpu.pcie_gb_s * 1e9) if gpu else 0.0
        self.cpu = sizes.expert / hardware.ram.rate
        self.disk = sizes.expert / (hardware.disk.read_gb_s * 1e9)

    def layer(self, number: int, call: Call) -> Spent:
        """One decoder layer; of one without experts the call is of none."""
        spent = self._dense(self._sizes.dense[number] + self._sizes.passed(number), self.on_gpu(number))
        hot, cold = call.hot * self.gpu, call.cold * self.cpu
        read = call.missing * self.disk + self.cpu if call.missing else 0.0
        if hot >= max(cold, read):
            spent[EXPERTS_GPU] += hot
        else:
            spent[EXPERTS_CPU] += cold
            spent[WAITING] += max(read - cold, 0.0)
        gpu = self._hardware.gpu
        if gpu and (self.on_gpu(number) or call.hot):
            spent[CALLS] += gpu.layer_us * 1e-6
        if not self.on_gpu(number):
            spent[CALLS] += self._hardware.cpu.layer_us * 1e-6
        if gpu and self.exchanged(number, call):
            spent[CALLS] += gpu.exchange_us * 1e-6
        return spent

    def token(self) -> Spent:
        """What a token costs beside its layers."""
        spent = self._dense(self._sizes.head, self._budget.head_on_gpu)
        spent[CALLS] += self._hardware.cpu.token_us * 1e-6
        return spent

    def on_gpu(self, number: int) -> bool:
        """Does the dense part of a layer lie in VRAM."""
        return number < self._budget.gpu_layers

    def exchanged(self, number: int, call: Call) -> int:
        """Bytes over PCIe, both ways, because one of the two computes some experts for the other's dense part."""
        elsewhere = call.cold if self.on_gpu(number) else call.hot
        return 2 * FLOAT * self._sizes.spec.hidden_size if elsewhere else 0

    def _dense(self, nbytes: int, on_gpu: bool) -> Spent:
        rate = self._gpu_rate if on_gpu else self._hardware.ram.rate
        return defaultdict(float, {DENSE_GPU if on_gpu else DENSE_CPU: nbytes / rate})
