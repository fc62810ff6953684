"""mosaic-run in this process, which has torch in memory already."""

import io
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from mosaic import _native
from mosaic.runtime.terminal.cli import main
from support.mosaic_run import assert_refused


@pytest.fixture
def here(monkeypatch, capsys):
    """Runs mosaic-run, given some standard input: what a process would leave."""
    threads = _native.threads()

    def call(*arguments: object, given: bytes = b"") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["mosaic-run", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        with pytest.raises(SystemExit) as caught:
            main()
        return subprocess.CompletedProcess([], int(caught.value.code or 0), *capsys.readouterr())

    yield call
    _native.set_threads(threads)
    torch.set_num_threads(1)


@pytest.fixture
def refused(here) -> Callable[..., None]:
    """Runs mosaic-run and checks that it refuses, and says why."""

    def check(*arguments: object, words: tuple[str, ...], given: bytes = b"") -> None:
        assert_refused(here(*arguments, given=given), *words)

    return check
