"""mosaic-run in this process."""

import io
import subprocess
import sys

import pytest
import torch

from mosaic import _native
from mosaic.runtime.terminal.cli import main
from support.mosaic_run import assert_refused


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs mosaic-run in this process and checks that it refuses."""
    threads = _native.threads()

    def check(*arguments: object, words: tuple[str, ...], given: bytes = b"") -> None:
        monkeypatch.setattr(sys, "argv", ["mosaic-run", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert_refused(subprocess.CompletedProcess([], caught.value.code, out, err), *words)

    yield check
    _native.set_threads(threads)
    torch.set_num_threads(1)
