"""Order and lifetimes of uploads, with a device that copies when the test says so, and as late as it can."""

import itertools
import random
import threading
import traceback

import numpy as np
import pytest
import torch

from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.experts import uploads as module
from mosaic.runtime.experts.uploads import Uploads
from support.interrupts import InterruptAt
from support.slow_device import PATIENCE, Moment, SlowDevice

NBYTES = 1000
BUFFERS = 4


def over() -> Moment:
    moment = Moment()
    moment.come.set()
    return moment


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "uploads"]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert not running()


@pytest.fixture
def device():
    return SlowDevice()


@pytest.fixture
def uploads(device):
    """With one thread, so that the order is known."""
    made = Uploads(device, NBYTES, BUFFERS, threads=1)
    yield made
    end(made, device)


def end(uploads: Uploads, device: SlowDevice) -> None:
    """Close while the device goes on."""
    closer = threading.Thread(target=uploads.close)
    closer.start()
    while closer.is_alive():
        for copy in device.begun(0):
            copy.after.come.set()
            copy.finish()
        closer.join(0.001)


class Load:
    """Random bytes in two parts, and zeros on the device in two others, the second of them two bytes each."""

    def __init__(self, seed: int, uploads: Uploads, after: Moment | None = None, most: int = NBYTES) -> None:
        draw = np.random.default_rng(seed)
        scales = 2 * int(draw.integers(1, most // 4))
        nbytes = int(draw.integers(scales, most + 1))
        self.bytes = draw.integers(1, 256, nbytes).astype(np.uint8)
        self.source = [part.copy() for part in np.split(self.bytes, [int(draw.integers(1, nbytes))])]
        self.target = [torch.zeros(nbytes - scales, dtype=torch.uint8), torch.zeros(scales // 2, dtype=torch.bfloat16)]
        self.after = after or over()
        self.upload = uploads.send(self.source, self.target, self.after)

    def spoil(self) -> None:
        """The source is someone else's now."""
        for part in self.source:
            part[:] = 0

    @property
    def arrived(self) -> np.ndarray:
        return np.concatenate([part.view(torch.uint8).numpy() for part in self.target])

    @property
    def whole(self) -> bool:
        return np.array_equal(self.arrived, self.bytes)

    @property
    def untouched(self) -> bool:
        return not self.arrived.any()


class SlowPart:
    """A part of a source; whoever reads it waits for the test."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.nbytes = values, values.nbytes
        self.read, self.go_on = threading.Event(), threading.Event()

    def __array__(self, *arguments, **options) -> np.ndarray:
        self.read.set()
        assert self.go_on.wait(PATIENCE)
        return self.values


@pytest.mark.parametrize("seed", range(12))
def test_bytes_arrive_whatever_the_order(seed):
    """Sources are spoilt as soon as they may be; fences and copies come in any order."""
    draw = random.Random(seed)
    device = SlowDevice()
    uploads = Uploads(device, NBYTES, draw.randint(1, 5), draw.randint(1, 3))
    loads, flying, moments, finished = [], [], [], 0

    def look() -> None:
        for load in flying[:]:
            if uploads.staged(load.upload):
                load.spoil()
            if uploads.landed(load.upload):
                assert load.whole
                flying.remove(load)

    while len(loads) < 60 or flying:
        if len(loads) < 60 and draw.random() < 0.4:
            if draw.random() < 0.3:
                moments.append(Moment())
            after = draw.choice(moments) if moments and draw.random() < 0.7 else None
            loads.append(Load(len(loads), uploads, after))
            flying.append(loads[-1])
        for moment in moments:
            if draw.random() < 0.1:
                moment.come.set()
        if len(device.copies) == finished < 2 * len(loads):
            device.begun(finished + 1)  # all buffers are free
        waiting = [copy for copy in device.copies if not copy.moment.over()]
        for copy in draw.sample(waiting, draw.randint(0, len(waiting))):
            if copy.after.over():
                copy.finish()
                finished += 1
        look()
    assert all(load.whole for load in loads)
    uploads.close()


def test_the_host_is_a_device():
    device = HostDevice()
    uploads = Uploads(device, NBYTES)
    loads = [Load(seed, uploads, after=device.fence()) for seed in range(10)]
    for load in loads:
        uploads.wait(load.upload)
        assert uploads.landed(load.upload)
        assert load.whole
    uploads.close()


def test_with_all_buffers_busy_uploads_queue_in_order_and_no_buffer_is_rewritten(uploads, device):
    """The caller goes on, and the thread waits for the copies that began first."""
    loads = [Load(seed, uploads) for seed in range(3 * BUFFERS)]
    for number, load in enumerate(loads):
        busy = loads[number : number + BUFFERS]
        copies = device.begun(2 * (number + len(busy)))
        uploads.wait(busy[-1].upload)
        if len(busy) == BUFFERS < len(loads) - number:
            assert copies[2 * number].moment.awaited.wait(PATIENCE)
            assert not uploads.staged(loads[number + BUFFERS].upload)
        assert device.copies == copies
        for copy, target in zip(copies[2 * number :], load.target, strict=False):
            assert copy.target.data_ptr() == target.data_ptr()
            assert not uploads.landed(load.upload)
            copy.finish()
        assert uploads.landed(load.upload)
        assert load.whole


def test_nothing_is_written_before_its_fence(uploads, device):
    """It is staged meanwhile."""
    after = Moment()
    load = Load(0, uploads, after)
    copies = device.begun(2)
    assert [copy.after for copy in copies] == [after, after]
    uploads.wait(load.upload)
    assert uploads.staged(load.upload)
    assert not uploads.landed(load.upload)
    assert load.untouched
    after.come.set()
    for copy in copies:
        assert not uploads.landed(load.upload)
        copy.finish()
    assert uploads.landed(load.upload)
    assert load.upload.fences == [copy.moment for copy in copies]


def test_a_source_is_kept_until_it_was_read(device):
    uploads = Uploads(device, NBYTES, threads=2)
    part = SlowPart(np.full(50, 7, np.uint8))
    target = torch.zeros(50, dtype=torch.uint8)
    upload = uploads.send([part], [target], over())
    assert part.read.wait(PATIENCE)
    assert not uploads.staged(upload)
    other = Load(1, uploads)  # passes it
    uploads.wait(other.upload)
    assert not uploads.staged(upload)
    part.go_on.set()
    uploads.wait(upload)
    assert uploads.staged(upload)
    part.values[:] = 0
    for copy in device.begun(3):
        copy.finish()
    assert target.tolist() == [7] * 50
    uploads.close()


@pytest.mark.parametrize(("source", "target"), [(10, 11), (11, 10), (NBYTES + 1, NBYTES + 1)])
def test_sizes_must_agree(uploads, device, source, target):
    with pytest.raises(ValueError, match=f"{source} bytes for {target}"):
        uploads.send([np.zeros(source, np.uint8)], [torch.zeros(target, dtype=torch.uint8)], over())
    assert not device.copies


def test_an_error_in_a_thread_is_the_main_threads_to_see(device):
    """Whichever upload it asks about, and again; the other copies are waited for."""
    uploads = Uploads(device, NBYTES, threads=1)
    good = Load(0, uploads)
    copies = device.begun(2)
    target = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
    device.broken.add(target[1].data_ptr())
    bad = uploads.send([np.ones(20, np.uint8)], target, over())
    with pytest.raises(RuntimeError, match="the device is gone") as caught:
        uploads.wait(bad)
    assert {"_carry", "upload"} <= {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
    for ask in (uploads.staged, uploads.landed):
        for upload in (bad, good.upload):
            with pytest.raises(RuntimeError, match="the device is gone"):
                ask(upload)
    for copy in copies:
        copy.finish()
    end(uploads, device)
    assert good.whole
    assert [part.any().item() for part in target] == [True, False]  # its first copy had begun


def test_a_source_that_cannot_be_read_is_an_error(uploads):
    upload = uploads.send([np.zeros((2, 5), np.uint8)], [torch.zeros(10, dtype=torch.uint8)], over())
    with pytest.raises(ValueError, match="could not broadcast"):
        uploads.wait(upload)


def send_forever(uploads):
    while True:
        uploads.send([np.zeros(1, np.uint8)], [torch.zeros(1, dtype=torch.uint8)], over())


def test_closing_gives_up_what_has_not_begun(uploads, device):
    """And waits for what the device was told to do."""
    loads = [Load(seed, uploads) for seed in range(BUFFERS + 5)]
    copies = device.begun(2 * BUFFERS)
    assert copies[0].moment.awaited.wait(PATIENCE)
    closer = threading.Thread(target=uploads.close)
    closer.start()
    with pytest.raises(ValueError, match="closed"):
        send_forever(uploads)
    for copy in copies:
        assert closer.is_alive()
        copy.finish()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert len(device.copies) == 2 * BUFFERS
    for load in loads[:BUFFERS]:
        assert uploads.landed(load.upload)
        assert load.whole
    for load in loads[BUFFERS:]:
        assert uploads.staged(load.upload)  # nobody reads it
        assert not uploads.landed(load.upload)
        assert load.untouched


def test_closing_waits_for_what_is_being_read(device):
    uploads = Uploads(device, NBYTES)
    parts = [SlowPart(np.full(50, 7, np.uint8)) for _ in range(2)]
    target = [torch.zeros(50, dtype=torch.uint8) for _ in range(2)]
    for pair in zip(parts, target, strict=True):
        uploads.send(pair[:1], pair[1:], over())
    assert all(part.read.wait(PATIENCE) for part in parts)
    closer = threading.Thread(target=uploads.close)
    closer.start()
    for part in parts:
        assert closer.is_alive()
        part.go_on.set()
    for copy in device.begun(2):
        assert closer.is_alive()
        copy.finish()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert [part.tolist() for part in target] == [[7] * 50] * 2


def test_closing_twice_and_before_anything_was_sent():
    uploads = Uploads(SlowDevice(), NBYTES)
    uploads.close()
    uploads.close()
    with pytest.raises(ValueError, match="closed"):
        Load(0, uploads)


def test_what_nobody_holds_ends():
    device = SlowDevice(flowing=True)
    uploads = Uploads(device, NBYTES)
    load = Load(0, uploads)
    device.begun(2)
    del uploads
    assert not running()
    assert load.whole


def test_ctrl_c_between_any_two_lines_leaves_nothing_running_after_close():
    """Nor anything that writes to a target."""

    def use(uploads: Uploads, loads: list[Load]) -> None:
        loads += [Load(seed, uploads) for seed in range(BUFFERS + 2)]
        uploads.wait(loads[0].upload)
        sum(uploads.landed(load.upload) for load in loads)
        uploads.close()

    for line in itertools.count(1):
        device, loads = SlowDevice(flowing=True), []
        uploads = Uploads(device, NBYTES, BUFFERS)
        interrupt = InterruptAt(line, {module.__file__})
        try:
            with interrupt:
                use(uploads, loads)
        except KeyboardInterrupt:
            pass
        uploads.close()
        assert not running()
        assert all(copy.moment.over() for copy in device.copies)
        assert all(load.whole or load.untouched for load in loads)
        if not interrupt.where:
            break
    assert line > 50


def test_ctrl_c_while_it_is_made_leaves_nothing_running():
    for line in itertools.count(1):
        uploads, interrupt = None, InterruptAt(line, {module.__file__})
        try:
            with interrupt:
                uploads = Uploads(SlowDevice(), NBYTES)
        except KeyboardInterrupt:
            assert uploads is None
        del uploads  # what of it was made
        for thread in running():
            thread.join(PATIENCE)
        assert not running()
        if not interrupt.where:
            break
    assert line > 15
