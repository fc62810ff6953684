"""Imported by every Python that check.sh starts with this folder in PYTHONPATH: which `mosaic` it finds, and instead of
what is missing a substitute.

An editable install answers for `mosaic` before sys.path is asked, so its finder has to go; see also run_against.py.
Substitutes are asked for last, so what is installed comes first.
"""

import sys
from pathlib import Path

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "_editable_skbc_mosaic_moe"]
sys.path.append(str(Path(__file__).parents[1] / "substitutes"))
