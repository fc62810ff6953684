"""Helpers of the test suite. Nothing here imports mosaic: what judges the code must not be made of it."""
