"""Package data: conversion recipes (*.yaml) and the embedded demo checkpoint (demo/).

`demo_model` is what --demo stands for: the demo checkpoint, converted once into the user's `cache_folder`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mosaic.format.errors import InputError

FOLDER = Path(__file__).parent
DEMO_CHECKPOINT = FOLDER / "demo" / "checkpoint"
SAMPLE_TEXT = FOLDER / "demo" / "heldout" / "austen.txt"  # English prose


def cache_folder() -> Path:
    """Where what can be made again is kept for this user; it may not exist yet."""
    wished = os.environ.get("XDG_CACHE_HOME", "")
    return Path(wished if Path(wished).is_absolute() else Path.home() / ".cache") / "mosaic"


def demo_model() -> Path:
    """The model directory of the embedded demo, converting it first if the cache does not have it.

    mosaic-convert runs as a process of its own, into a temporary folder beside the final one, so that two first uses
    at once do no harm.
    """
    cache = cache_folder()
    model = cache / f"demo-{_digest(DEMO_CHECKPOINT)}"
    if (model / "mosaic.json").is_file():
        return model
    print(f"converting the embedded demo into {model}", file=sys.stderr)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "demo"
            command = [sys.executable, "-m", "mosaic.convert.cli", str(DEMO_CHECKPOINT), str(made), "--quiet"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            try:
                made.rename(model)
            except OSError:  # something is there: the work of a faster process, or a wreck
                if not (model / "mosaic.json").is_file():
                    shutil.rmtree(model)
                    made.rename(model)
    except (OSError, subprocess.CalledProcessError) as error:
        if not (model / "mosaic.json").is_file():  # else another process was faster
            raise InputError(
                "the demo cannot be converted into the cache folder",
                file=cache,
                found=error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error,
                expected="a folder that can be written to",
                remedy="set XDG_CACHE_HOME to another folder, or mosaic-convert the demo checkpoint yourself",
            ) from error
    return model


def _digest(folder: Path) -> str:
    """Short identity of what the cached model depends on: checkpoint, recipes and the converter's sources."""
    digest, package = hashlib.sha256(), FOLDER.parent
    sources = [*FOLDER.glob("*.yaml"), *package.glob("convert/*.py"), *package.glob("format/**/*.py")]
    for file in (*sorted(folder.iterdir()), *sorted(sources)):
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
