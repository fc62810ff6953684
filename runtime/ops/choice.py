"""Which implementation of the operations a program runs on, and on how many threads."""

from enum import StrEnum
from typing import TypeVar

import torch

from mosaic.format.errors import InputError
from mosaic.runtime.machine import cores
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import Activations, CpuOps, isa, set_threads
from mosaic.runtime.ops.reference import ReferenceOps

__all__ = ["Activations", "OpsName", "make_ops", "option"]

Choice = TypeVar("Choice", bound=StrEnum)


class OpsName(StrEnum):
    """Implementations of the operations."""

    CPU = "cpu"
    REFERENCE = "reference"


def option(name: str, value: str, choices: type[Choice]) -> Choice:
    """The choice that the value of an option names; InputError if there is none."""
    try:
        return choices(value)
    except ValueError as error:
        remedy = "choose one of them"
        raise InputError(f"no such --{name}", found=value, expected=", ".join(choices), remedy=remedy) from error


def make_ops(name: OpsName, activations: Activations = Activations.F32, threads: int | None = None) -> Ops:
    """Ready to use. `threads`: all cores unless given. InputError for a MOSAIC_ISA that is not to be had."""
    count = threads or cores()
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
