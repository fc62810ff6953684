"""Package data: conversion recipes (*.yaml) and the embedded demo checkpoint (demo/)."""

from pathlib import Path

FOLDER = Path(__file__).parent
DEMO_CHECKPOINT = FOLDER / "demo" / "checkpoint"
