"""What has to be right before anything is built or run: arguments, packages, a card, a folder for the result.

`needs.py ARGUMENTS`, those of check.sh, `--build` among them if something will be built. Exit code 2 and one message
if something is not right. Needs no package itself: a Python that has none of them is told which.
"""

import os
import re
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

PARTS = ("kernels", "engine", "rates", "speed")
PARITY = ("kernels", "engine")
LAYERS = 8
#: Modules, by the names of their packages.
PACKAGES = {name: name for name in ("torch", "numpy", "ml_dtypes", "jinja2", "tokenizers", "typer", "tqdm")}
PACKAGES |= {"pyyaml": "yaml", "safetensors": "safetensors", "hypothesis": "hypothesis", "pytest": "pytest"}
CARD_PACKAGES = {"triton": "triton"}
BUILD_PACKAGES = {"pip": "pip", "scikit-build-core": "scikit_build_core", "pybind11": "pybind11"}
#: Programs, of which one is needed; a package of a program's name brings it, too.
BUILD_PROGRAMS = {"cmake": ("cmake",), "ninja or make": ("ninja", "make"), "gcc": ("c++", "g++")}
PIP = (22, 1)  # the first to know --config-settings


def options(arguments: Sequence[str]) -> Namespace:
    """`parts`: a list of names; `layers`, `rehearse`, `build`. Wrong ones end the program with exit code 2."""
    parser = ArgumentParser("check.sh", add_help=False, allow_abbrev=False)  # check.sh has the help
    parser.add_argument("--parts", metavar="NAMES", type=lambda names: names.split(","), default=list(PARTS))
    parser.add_argument("--quick", action="store_const", const=list(PARITY), dest="parts", default=list(PARTS))
    parser.add_argument("--layers", metavar="N", type=int, default=LAYERS)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    found = parser.parse_args(arguments)
    if unknown := sorted(set(found.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)} (choose some of {','.join(PARTS)})")
    if found.layers < 1:
        parser.error(f"--layers {found.layers}: at least 1")
    return found


def main() -> None:
    """In the order of what a person can mend soonest."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    asked = options(sys.argv[1:])
    if missing := _missing(asked):
        _refuse(f"{sys.executable} lacks {', '.join(missing)}; install that, or choose another Python by PYTHON")
    if not asked.rehearse and (trouble := _no_card()):
        _refuse(f"{trouble}; --rehearse runs everything without one")
    if out := os.environ.get("OUT"):
        _check_folder(Path(out))


def _missing(asked: Namespace) -> list[str]:
    packages = PACKAGES | ({} if asked.rehearse else CARD_PACKAGES) | (BUILD_PACKAGES if asked.build else {})
    missing = [name for name, module in packages.items() if not find_spec(module)]
    if asked.build:
        missing += [name for name, programs in BUILD_PROGRAMS.items() if not any(map(_has_program, programs))]
        if "pip" not in missing and (old := _old_pip()):
            missing.append(f"a pip of at least {'.'.join(map(str, PIP))} (it has {old})")
    return missing


def _has_program(name: str) -> bool:
    return bool(shutil.which(name) or find_spec(name))


def _old_pip() -> str:
    """Its version if it is too old."""
    try:
        found = version("pip")
    except PackageNotFoundError:  # without metadata: a distributor's
        return ""
    return found if tuple(map(int, re.findall(r"\d+", found)[:2])) < PIP else ""


def _no_card() -> str:
    """Why torch can use none, if so."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"{sys.executable} has a torch that cannot be imported: {error}"
    if torch.cuda.is_available():
        return ""
    why = "see nvidia-smi" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
    return f"no NVIDIA card that torch can use here ({why})"


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _refuse(f"OUT={folder}: {error.strerror}")


def _refuse(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
