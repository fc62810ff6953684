"""What a device had of a model goes with the model, though the device knows it by its recordings."""

import gc
import threading
import weakref

from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.ops.cuda import graphs
from support.recording import Recording
from support.tiered import answer, load

IDS = list(range(40, 80))


class Knowing(HostDevice):
    """Knows the segments that it ran, as a GPU does, whether it has recorded them or not."""

    def __init__(self) -> None:
        super().__init__(room=1 << 30)
        self.graphs = graphs.Graphs(Recording())
        self.run = self.graphs.run


def uploading() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "uploads"}


def test_nothing_is_left(folders, monkeypatch):
    monkeypatch.setattr(graphs, "PLAIN_RUNS", 1 << 30)  # kernels of the host cannot be recorded
    before, device = uploading(), Knowing()
    engine = load(folders("small"), device, layers=4, slots=8)
    assert answer(engine, IDS, 12) == answer(load(folders("small")), IDS, 12)
    gone = weakref.ref(device)
    assert len(uploading() - before) == 2
    assert device.graphs._known
    del engine, device
    gc.collect()
    assert gone() is None
    assert uploading() == before
