"""Which device a program uses beside the host, by what --device says."""

from dataclasses import dataclass

from mosaic.format.errors import InputError
from mosaic.runtime.device import Device
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.options import parse_device


@dataclass(frozen=True)
class DeviceChoice:
    """A device, or none; `needed`: it was asked for by name, so a model that it cannot help is refused.

    `why`: there is none, where one would have been welcome.
    """

    device: Device | None
    needed: bool
    why: str = ""

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
    except InputError as error:
        if needed:
            raise
        return DeviceChoice(None, needed=False, why=str(error.facts.get("found", error)))


def device_beside(ops: Ops, wanted: Device | str, *, used: bool = False) -> DeviceChoice:
    """The same for a run on these operations of the host: only the CPU's kernels work beside a device.

    A device that is there already is taken as it is.
    """
    if not isinstance(wanted, str):
        if not hasattr(wanted, "memory"):
            expected = "cpu, cuda, cuda:N, auto, or an object that is a device"
            raise InputError("no such device", found=repr(wanted), expected=expected, remedy="name one of them")
        return DeviceChoice(wanted, needed=True)
    if used and parse_device(wanted)[0] == "cpu":
        remedy = "leave them out, or the device"
        raise InputError("sizes for a device that is not used", found="cpu", expected="a GPU", remedy=remedy)
    if isinstance(ops, CpuOps):
        return choose_device(wanted, used=used)
    if used or parse_device(wanted)[0] == "cuda":
        raise InputError(
            "a device needs the CPU's kernels beside it",
            found="others (--ops), or ones that are timed (--profile)",
            expected="--ops cpu without --profile",
            remedy="leave those out, or whatever is said of a device",
        )
    return HOST_ONLY
