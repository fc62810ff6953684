"""Decoding on a machine that is not here: recorded routing through the real policies, and what it would cost.

Decisions are those of `mosaic.runtime.experts`; times are arithmetic over a hardware profile. Nothing is measured.
"""

from pathlib import Path

FOLDER = Path(__file__).parent  # of the package data beside the code
