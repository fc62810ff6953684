"""Runs a model directory: weights where they lie, state, sampling, text."""
