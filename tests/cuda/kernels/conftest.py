"""Kernels of `mosaic.runtime.ops.cuda` where they can run: under triton's interpreter, or on a GPU if there is one.

Whether triton interprets is decided when it is imported, so these tests are a process of their own:
TRITON_INTERPRET=1 pytest tests/cuda/kernels, which tests/cuda/test_kernels.py does. On a machine with a GPU they run
on it without that.
"""

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = importlib.util.find_spec("triton") and (INTERPRETED or torch.cuda.is_available())
collect_ignore_glob = [] if HERE else ["test_*.py"]


@pytest.fixture
def device():
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")
