"""Runs pytest against the package installed in another folder: `run_against.py FOLDER TESTS...`.

An editable install answers for `mosaic` before sys.path is asked, so its finder has to go first.
"""

import sys
from pathlib import Path

import pytest

folder = Path(sys.argv[1]).resolve()
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "_editable_skbc_mosaic_moe"]
sys.path.insert(0, str(folder))

from mosaic import _native  # noqa: E402 - found only now

assert Path(_native.__file__).is_relative_to(folder), _native.__file__
sys.exit(pytest.main(["-q", *sys.argv[2:]]))
