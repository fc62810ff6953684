"""Compile every kernel for every GPU the code is meant for, without one, and report what each takes.

    python tests/cuda/compile.py [sm_89 ...] [--json]

What is compiled is what the functions of `mosaic.runtime.ops.cuda` launch at the sizes of the 35B model: the launches
are recorded instead of run, so this list cannot differ from them. ptxas and cuobjdump come with triton.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support.gpu_launches import launch_all  # noqa: E402

#: The oldest target may spill: this triton has no tensor cores for it, and nobody is promised speed there.
MAY_SPILL = {"sm_75"}
#: Most shared memory of a program (CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
TARGETS = {f"sm_{number}": number for number in SHARED}
TYPES = {
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}


@dataclass(frozen=True)
class Launch:
    """A kernel as it was launched: the types of its arguments, its constants, what is divisible by 16, its options."""

    name: str
    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, object]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes: registers of a thread, bytes of shared memory, bytes that were spilled.

    `unwanted`: atomics and native FP8 instructions in it.
    """

    kernel: str
    target: str
    warps: int
    registers: int
    shared: int
    spilled: int
    unwanted: list[str]

    @property
    def right(self) -> bool:
        """Whether it fits the target and keeps the promises of the package."""
        fits = self.shared <= SHARED[TARGETS[self.target]] * 1024
        return fits and not self.unwanted and (not self.spilled or self.target in MAY_SPILL)


def described(kernel: JITFunction, arguments: tuple, keywords: dict[str, object]) -> Launch:
    """Types as triton's launcher finds them: an int of 1 is a constant, and so is None."""
    options = tuple((name, keywords.pop(name)) for name in ("num_warps", "num_stages") if name in keywords)
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature, constants, aligned = {}, {}, []
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            aligned.append(place)  # what torch allocates on a GPU is; views of it begin at multiples of 16, too
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            aligned += [place] if value % 16 == 0 else []
    name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
    return Launch(name, kernel, signature, constants, tuple(aligned), options)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What is launched meanwhile, instead of launching it; the same launch once."""
    found: list[Launch] = []

    def record(kernel: JITFunction, *arguments: object, grid: object, warmup: bool, **keywords: object) -> None:
        launch = described(kernel, arguments, keywords)
        if launch not in found:
            found.append(launch)

    run, JITFunction.run = JITFunction.run, record
    try:
        yield found
    finally:
        JITFunction.run = run


def compiled(launch: Launch, arch: int) -> triton.compiler.CompiledKernel:
    """Raises what triton does if it cannot be done."""
    attributes = {(place,): [["tt.divisibility", 16]] for place in launch.aligned}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True} | dict(launch.options)
    )


def usage(launch: Launch, target: str, kernel: triton.compiler.CompiledKernel) -> Usage:
    """By cuobjdump, but for shared memory, which is given at the launch."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    spilled = found["STACK"] + found["LOCAL"]
    unwanted = sorted(set(re.findall(r"\b(?:atom|red)\.\S+|\S*e4m3\S*", kernel.asm["ptx"])))
    figures = kernel.metadata.num_warps, found["REG"], kernel.metadata.shared, spilled
    return Usage(label(launch), target, *figures, unwanted)


def label(launch: Launch) -> str:
    """Its name and what tells its variants apart."""
    types = [kind[1:] for name, kind in launch.signature.items() if name in ("matrix", "values") and kind[0] == "*"]
    scales = {"*bf16": ["bf16 scales"], "*fp32": ["f32 scales"]}.get(launch.signature.get("scales", ""), [])
    named = ("vectors", "normalize", "swiglu")
    sizes = [f"{name} {launch.constants[name]}" for name in named if name in launch.constants]
    added = ["sum"] if launch.signature.get("y", "constexpr") != "constexpr" else []
    return " ".join([launch.name, *types, *scales, *sizes, *added])


def main() -> bool:
    """Print a table, or with --json a list of `Usage`; whether all is right."""
    names = [name for name in sys.argv[1:] if name != "--json"] or list(TARGETS)
    with recorded() as launches:
        launch_all()
    rows = [usage(launch, name, compiled(launch, TARGETS[name])) for launch in launches for name in names]
    if "--json" in sys.argv:
        print(json.dumps([asdict(row) for row in rows]))
        return all(row.right for row in rows)
    print(f"triton {triton.__version__}; registers of a thread / KiB of shared memory / bytes spilled")
    print(f"{'kernel':44} warps " + "".join(f"{name:>16}" for name in names))
    for start in range(0, len(rows), len(names)):
        line = rows[start : start + len(names)]
        cells = "".join(f"{f'{row.registers} / {row.shared / 1024:.0f} / {row.spilled}':>16}" for row in line)
        print(f"{line[0].kernel:44} {line[0].warps:5} {cells}")
    wrong = [row for row in rows if not row.right]
    print("\n".join(f"not right: {row}" for row in wrong) or f"all {len(rows)} are right")
    return not wrong


if __name__ == "__main__":
    sys.exit(not main())
