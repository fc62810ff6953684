"""What the check runs on, as JSON: `machine.py [--rehearse]`. Exit code 2 if there is no card. Started by check.py."""

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mosaic import _native
from mosaic.format.program import run_program
from mosaic.runtime import machine
from mosaic.runtime.sizes import format_size

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Print it."""
    memory = format_size(machine.total_memory())
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    facts = {
        "card": "none, this is a rehearsal: figures mean nothing" if "--rehearse" in sys.argv else _card(),
        "host": f"{machine.cores()} cores, {_native.isa()}, {memory}, {platform.platform()}",
        "versions": f"Python {platform.python_version()}, {', '.join(map(_package, ('torch', 'triton', 'numpy')))}",
        "mosaic": f"{commit or 'no commit'}, {_native.__file__}",
    }
    print(json.dumps(facts))


def _card() -> str:
    """InputError if there is none that can be used."""
    import torch  # a second or more, which a rehearsal saves

    from mosaic.runtime.ops.cuda.find import find_gpu

    name = find_gpu(None).name
    properties = torch.cuda.get_device_properties(0)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    size = format_size(properties.total_memory)
    return f"{name}, {size}, sm_{properties.major}{properties.minor}, driver {driver or 'unknown'}"


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def _output(*command: str) -> str:
    """Nothing if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    run_program(main)
