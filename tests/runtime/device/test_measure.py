"""The costs of an expert, on a device of which they are known."""

import torch

from mosaic.runtime.device import measure as module
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.device.measure import LAUNCHES, ROUNDS, TOGETHER, measure
from mosaic.runtime.experts.expert_slots import ExpertSlots

HIDDEN, INNER, SLOTS = 128, 128, 5
UPLOAD, APPLY = 0.25, 0.5  # seconds


class Timed(HostDevice):
    """Takes its time, and a hundred times that for what it does for the first time."""

    def __init__(self):
        super().__init__()
        self.now, self.uploads, self.applied = 0, [], []
        self.ops.apply = self.apply

    def upload(self, source, target, after):
        self.now += UPLOAD if len(self.uploads) > 1 else 100 * UPLOAD
        self.uploads.append(target)
        return super().upload(source, target, after)

    def apply(self, x, slots, held, outputs):
        self.now += APPLY if self.applied else 100 * APPLY
        self.applied.append(slots.tolist())


def test_costs(monkeypatch):
    device = Timed()
    monkeypatch.setattr(module.time, "perf_counter", lambda: device.now)
    codes, scales = torch.full((SLOTS, 3 * HIDDEN * INNER), 7, dtype=torch.uint8), torch.ones(SLOTS, 3).bfloat16()
    held = ExpertSlots(codes, scales, HIDDEN, INNER)
    copy, compute = measure(device, held)
    assert copy == 2 * UPLOAD  # codes and scales
    assert compute == APPLY / TOGETHER
    assert len(device.applied) == (ROUNDS + 1) * LAUNCHES
    assert {slot for [slots] in device.applied for slot in slots} == set(range(SLOTS))
    assert codes[1:].eq(7).all()
    assert scales[1:].eq(1).all()
