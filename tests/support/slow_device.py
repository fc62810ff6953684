"""A device whose copies are made when a test says so, in any order it likes."""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

PATIENCE = 3  # seconds for what must happen; a test that passes waits for none of them


class Moment:
    """A Fence that comes when a test says so; `awaited`: that someone waits for it."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.awaited = threading.Event()

    def over(self) -> bool:
        return self.come.is_set()

    def wait(self) -> None:
        self.awaited.set()
        assert self.come.wait(PATIENCE)


@dataclass(eq=False)
class DeviceCopy:
    """One that was asked for. The bytes are read and written when it is finished, as late as can be."""

    source: Tensor
    target: Tensor
    after: Moment
    moment: Moment

    def finish(self) -> None:
        assert self.after.over(), "a copy that came too early"
        self.target.copy_(self.source)
        self.moment.come.set()


class Flowing(Moment):
    """Of a device that goes on as soon as someone waits for it."""

    copy: DeviceCopy

    def wait(self) -> None:
        if not self.over():
            self.copy.finish()


class SlowDevice:
    """What `Uploads` needs of a Device. `broken`: it cannot copy to these targets, by the addresses of their bytes."""

    def __init__(self, *, flowing: bool = False) -> None:
        self.copies: list[DeviceCopy] = []
        self.broken: set[int] = set()
        self._moment = Flowing if flowing else Moment
        self._begun = threading.Condition()

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, source: Tensor, target: Tensor, after: Moment) -> Moment:
        assert source.dtype == target.dtype == torch.uint8
        assert source.shape == target.shape
        if target.data_ptr() in self.broken:
            raise RuntimeError("the device is gone")
        copy = DeviceCopy(source, target, after, self._moment())
        if isinstance(copy.moment, Flowing):
            copy.moment.copy = copy
        with self._begun:
            self.copies.append(copy)
            self._begun.notify_all()
        return copy.moment

    def begun(self, count: int) -> list[DeviceCopy]:
        """The copies, when so many were asked for."""
        with self._begun:
            assert self._begun.wait_for(lambda: len(self.copies) >= count, PATIENCE)
            return list(self.copies)
