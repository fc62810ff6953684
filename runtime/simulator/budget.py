"""What lies where on a simulated machine: experts in VRAM and RAM, and the dense weights beside them.

VRAM is given to the arena of experts first, then to whole decoder layers without their experts, from the first one on,
with what they remember of the context; the head follows if there is room. The CPU computes what is left. RAM that
remains is given to expert slots. Embedding rows are read from the disk one by one and count for nothing.
"""

from dataclasses import dataclass

from mosaic.format.errors import InputError
from mosaic.runtime.hardware import Hardware
from mosaic.runtime.simulator.sizes import ModelSizes
from mosaic.runtime.sizes import format_size

PROGRAM = 1 << 30  # bytes of RAM: Python, torch, the work of a prompt; assumed


@dataclass(frozen=True)
class Budget:
    """`vram_slots`, `ram_slots`: experts; `gpu_layers`: dense parts of so many first layers are in VRAM."""

    vram_slots: int
    ram_slots: int
    gpu_layers: int
    head_on_gpu: bool


def make_budget(hardware: Hardware, sizes: ModelSizes, arena: int, ram: int | None) -> Budget:
    """`arena`: bytes of VRAM for experts, 0 without a GPU. `ram`: bytes to take, None for what the profile leaves.

    InputError for more than there is, or less than two layers' experts of a token.
    """
    if ram is not None and ram > hardware.ram.nbytes:
        raise _refused("more memory than this machine has", ram, f"at most {format_size(hardware.ram.nbytes)}", "--ram")
    least = 2 * sizes.spec.moe.top_k
    most = max(least, sizes.num_experts)
    slots = min(arena // sizes.expert, most)
    gpu_layers, head_on_gpu = 0, False
    if hardware.gpu:
        usable = hardware.gpu.memory.usable
        if not least * sizes.expert <= arena <= usable:
            expected = f"{format_size(least * sizes.expert)} to {format_size(usable)}"
            raise _refused("this VRAM for experts is not usable here", arena, expected, "--vram")
        free = usable - slots * sizes.expert
        for layer, nbytes in enumerate(sizes.dense):
            needed = nbytes + sizes.remembered(layer)
            if needed > free:
                break
            free -= needed
            gpu_layers += 1
        head_on_gpu = gpu_layers == len(sizes.dense) and sizes.head <= free
    budget = hardware.ram.usable if ram is None else ram
    here = range(gpu_layers, len(sizes.dense))
    fixed = PROGRAM + sum(sizes.dense[layer] + sizes.remembered(layer) for layer in here)
    fixed += 0 if head_on_gpu else sizes.head
    ram_slots = min((budget - fixed) // sizes.expert, most)
    if ram_slots < least:
        expected = f"at least {format_size(fixed + least * sizes.expert)}"
        raise _refused("the memory does not suffice for this model", budget, expected, "--ram")
    return Budget(slots, ram_slots, gpu_layers, head_on_gpu)


def _refused(problem: str, found: int, expected: str, option: str) -> InputError:
    return InputError(problem, found=format_size(found), expected=expected, remedy=f"choose another size with {option}")
