"""A GPU's memory and streams; only where there is one."""

import pytest
import torch

from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.ops.cuda.find import find_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NBYTES = 1 << 24


@pytest.fixture(scope="module")
def gpu():
    return find_gpu(None)


def staged(gpu, value):
    staging = gpu.staging(NBYTES)
    assert staging.is_pinned()
    return staging.fill_(value)


def test_there_and_back(gpu):
    parts = [torch.randn(5, 7), torch.arange(9)[::2], torch.randn(3).bfloat16()]
    moved = [gpu.bring(part) for part in parts]
    assert all(part.device == gpu.place for part in moved)
    assert gpu.bring(moved[0]) is moved[0]
    for part, back in zip(parts, gpu.fetch(*moved), strict=True):
        assert back.device.type == "cpu"
        assert torch.equal(part, back)


def test_what_is_brought_may_change_at_once(gpu):
    x = torch.zeros(1 << 22)
    moved = gpu.bring(x)
    x.fill_(1)
    assert not gpu.fetch(moved)[0].any()


def test_an_upload_waits_for_what_came_before_it(gpu):
    """Operations read what was there; those that follow it read what was brought."""
    target = gpu.memory.empty("test", [NBYTES], torch.uint8).fill_(1)
    slow = torch.randn(4096, 4096, device=gpu.place)
    for _ in range(10):
        slow = slow @ slow * 1e-2
    before = target.clone()
    fence = gpu.upload(staged(gpu, 2), target, gpu.fence())
    gpu.follow(fence)
    after = target.clone()
    one, two = gpu.fetch(before, after)
    assert one.eq(1).all()
    assert two.eq(2).all()
    assert fence.over()


def test_uploads_land_in_their_order(gpu):
    target = gpu.memory.empty("test", [NBYTES], torch.uint8)
    fences = [gpu.upload(staged(gpu, value), target, gpu.fence()) for value in (1, 2, 3)]
    fences[-1].wait()
    assert all(fence.over() for fence in fences)
    assert gpu.fetch(target)[0].eq(3).all()


def test_free_memory(gpu):
    free = gpu.free()
    held = gpu.memory.empty("test", [1 << 30], torch.uint8)
    assert gpu.free() <= free - held.nbytes
    del held
    assert gpu.free() > free - (1 << 28)  # torch keeps it, and can give it


def test_what_an_expert_costs(gpu):
    hidden, inner = 2048, 512
    held = ExpertSlots(
        torch.zeros(8, 3 * hidden * inner, dtype=torch.uint8, device=gpu.place),
        torch.ones(8, 3 * hidden * inner // 2**14, device=gpu.place),
        hidden,
        inner,
    )
    copy, compute = gpu.measure(held)
    assert copy > 0
    assert compute > 0
