"""What the machine can do at most: that there are figures, and what is refused. How large they are is not tested."""

import math

import numpy as np
import pytest

from mosaic import _native

BYTES = np.ones(3_000_001, np.uint8)  # no whole chunk, no whole line


@pytest.mark.parametrize("isa", _native.isas())
def test_every_isa_has_figures(isa):
    for figure in (_native.read_bandwidth(BYTES, 1e-3, isa), _native.multiply_add_peak(1e-3, isa)):
        assert 0 < figure < math.inf
    assert (_native.bf16_dot_peak(1e-3, isa) > 0) == (isa in ("avx512", "amx"))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 255, 257, (1 << 20) + 1])
def test_buffers_of_any_size_are_read(count):
    for isa in _native.isas():
        assert _native.read_bandwidth(BYTES[1 : 1 + count], 1e-6, isa) > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 61.0])
def test_durations_without_sense_are_refused(seconds):
    with pytest.raises(ValueError, match="seconds is"):
        _native.read_bandwidth(BYTES, seconds)
    with pytest.raises(ValueError, match="seconds is"):
        _native.multiply_add_peak(seconds)
    with pytest.raises(ValueError, match="seconds is"):
        _native.bf16_dot_peak(seconds)


def test_wrong_buffers_are_refused():
    with pytest.raises(ValueError, match="buffer is empty"):
        _native.read_bandwidth(BYTES[:0], 1e-3)
    with pytest.raises(ValueError, match="buffer has elements of format 'f'"):
        _native.read_bandwidth(np.ones(64, np.float32), 1e-3)
    with pytest.raises(ValueError, match="buffer is not C-contiguous"):
        _native.read_bandwidth(BYTES[::2], 1e-3)


def test_unknown_isas_are_refused():
    with pytest.raises(ValueError, match="isa is 'mmx'"):
        _native.multiply_add_peak(1e-3, "mmx")
