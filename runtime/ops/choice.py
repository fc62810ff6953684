"""Which implementation of the operations a program runs on, and on how many threads."""

import os
from enum import StrEnum

import torch

from mosaic.format.errors import InputError
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import Activations, CpuOps, isa, set_threads
from mosaic.runtime.ops.reference import ReferenceOps

__all__ = ["Activations", "OpsName", "make_ops"]


class OpsName(StrEnum):
    """Implementations of the operations."""

    CPU = "cpu"
    REFERENCE = "reference"


def make_ops(name: OpsName, activations: Activations = Activations.F32, threads: int | None = None) -> Ops:
    """Ready to use. `threads`: all cores unless given. InputError for a MOSAIC_ISA that is not to be had."""
    count = threads or len(os.sched_getaffinity(0))
    try:
        isa()
    except ValueError as error:
        remedy = "unset MOSAIC_ISA, or choose one of these"
        raise InputError("the kernels asked for are not to be had", found=error, remedy=remedy) from error
    try:
        set_threads(count)
    except RuntimeError as error:
        expected = "as many as this machine gives a process"
        found, remedy = f"{count}: {error}", "choose fewer"
        raise InputError("threads are not to be had", found=found, expected=expected, remedy=remedy) from error
    if name is OpsName.REFERENCE:
        torch.set_num_threads(count)
        return ReferenceOps()
    return CpuOps(activations)
