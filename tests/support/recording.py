"""Recordings of segments without a GPU."""

import copy

from mosaic.runtime.device.states import DeviceCache


class Recording:
    """A Record whose graphs run the segment over again, knowing nothing that the host has learnt since.

    `made`: how many; `begun`: how often one was. `broken`: the next one fails.
    """

    def __init__(self):
        self.made, self.begun, self.broken = 0, 0, False

    def __call__(self, segment, x, addend, states):
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.made += 1
        frozen, outputs = [blind(state) for state in states], []

        def begin():
            self.begun += 1
            found = segment(x, addend, frozen)
            outputs[:] = outputs or found
            for output, part in zip(outputs, found, strict=True):
                output.copy_(part)
            return tuple(outputs)

        return begin


def blind(state):
    """Its memory on the device, and nothing of what the host keeps of it: neither lengths nor pages."""
    twin = copy.copy(state)
    if isinstance(twin, DeviceCache):
        twin.pages, twin.length = [], -1
    else:
        twin.position = -1
    return twin
