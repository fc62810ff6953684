"""Which device a program uses beside the host, by what --device says."""

from dataclasses import dataclass

from mosaic.format.errors import InputError
from mosaic.runtime.device import Device
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.options import parse_device


@dataclass(frozen=True)
class DeviceChoice:
    """A device, or none; `needed`: it was asked for by name, so a model that it cannot help is refused."""

    device: Device | None
    needed: bool

    @property
    def name(self) -> str | None:
        """The device's, for people; None if there is none."""
        return self.device.name if self.device else None


HOST_ONLY = DeviceChoice(None, needed=False)


def choose_device(wanted: str, *, used: bool = False) -> DeviceChoice:
    """Cpu, cuda, cuda:N, or auto: a GPU that can be used, if there is one.

    InputError if one is named that cannot be, or none can though something was said of it (`used`).
    """
    kind, number = parse_device(wanted)
    if kind == "cpu":
        return HOST_ONLY
    from mosaic.runtime.ops.cuda.find import find_gpu

    needed = used or kind == "cuda"
    try:
        return DeviceChoice(find_gpu(number), needed)
    except InputError:
        if needed:
            raise
        return HOST_ONLY


def device_beside(ops: Ops, wanted: Device | str, *, used: bool = False) -> DeviceChoice:
    """The same for a run on these operations of the host: only the CPU's kernels work beside a device.

    A device that is there already is taken as it is.
    """
    if not isinstance(wanted, str):
        return DeviceChoice(wanted, needed=True)
    if isinstance(ops, CpuOps):
        return choose_device(wanted, used=used)
    if used or parse_device(wanted)[0] == "cuda":
        found, remedy = "other operations than the CPU's kernels", "leave out --device, --ops and --profile"
        raise InputError("a device needs the CPU's kernels beside it", found=found, expected="cpu", remedy=remedy)
    return HOST_ONLY
