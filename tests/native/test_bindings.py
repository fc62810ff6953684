"""What mosaic._native refuses at its boundary, and how it chooses an instruction set. Not what kernels compute."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mosaic import _native


class TestBuffers:
    def test_shapes_may_differ_where_counts_agree(self):
        out = np.empty(256, np.float32)
        _native.e4m3_decode(np.arange(256, dtype=np.uint8).reshape(16, 16), out)
        assert out[1] == 2**-9

    def test_bytes_and_memoryviews(self):
        out = np.empty(2, np.float32)
        _native.e4m3_decode(memoryview(b"\x38\xb8"), out)
        assert out.tolist() == [1, -1]

    @pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.uint16, np.float32])
    def test_wrong_type_of_codes(self, dtype):
        with pytest.raises(ValueError, match=r"codes has elements of format .*expected uint8"):
            _native.e4m3_decode(np.zeros(4, dtype), np.empty(4, np.float32))

    @pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, ">f4"])
    def test_wrong_type_of_values(self, dtype):
        with pytest.raises(ValueError, match=r"values has elements of format .*expected float32"):
            _native.e4m3_encode(np.zeros(4, dtype), np.empty(4, np.uint8))

    @pytest.mark.parametrize("view", [np.s_[::2], np.s_[:, :4], np.s_[::-1]])
    def test_not_contiguous(self, view):
        codes = np.zeros((8, 8), np.uint8)[view]
        with pytest.raises(ValueError, match="codes is not C-contiguous"):
            _native.e4m3_decode(codes, np.empty(codes.shape, np.float32))
        with pytest.raises(ValueError, match="out is not C-contiguous"):
            _native.e4m3_encode(np.zeros(codes.shape, np.float32), codes)

    def test_fortran_order(self):
        with pytest.raises(ValueError, match="codes is not C-contiguous"):
            _native.e4m3_decode(np.zeros((4, 8), np.uint8, order="F"), np.empty((4, 8), np.float32))

    def test_counts_differ(self):
        with pytest.raises(ValueError, match="out has 5 elements, expected 4, as many as codes"):
            _native.e4m3_decode(np.zeros(4, np.uint8), np.empty(5, np.float32))

    def test_read_only_out(self):
        with pytest.raises(ValueError, match="out is read-only, expected a writable buffer"):
            _native.e4m3_encode(np.zeros(4, np.float32), b"1234")

    def test_overlap(self):
        values = np.zeros(16, np.float32)
        with pytest.raises(ValueError, match="out overlaps values"):
            _native.e4m3_encode(values, values.view(np.uint8)[4:20])

    def test_no_buffer_at_all(self):
        with pytest.raises(TypeError):
            _native.e4m3_decode([1, 2], np.empty(2, np.float32))


class TestDispatch:
    def run(self, code, **environment):
        inherited = {name: value for name, value in os.environ.items() if name != "MOSAIC_ISA"}
        return subprocess.run(
            [sys.executable, "-c", f"from mosaic import _native; {code}"],
            env=inherited | environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def test_slowest_first(self):
        assert _native.isas()[0] == "scalar"
        assert list(_native.isas()) == sorted(_native.isas(), key=("scalar", "avx2", "avx512", "amx").index)

    @pytest.mark.parametrize("environment", [{}, {"MOSAIC_ISA": ""}])
    def test_fastest_by_default(self, environment):
        assert self.run("print(_native.isa())", **environment).stdout.strip() == _native.isas()[-1]

    @pytest.mark.parametrize("forced", _native.isas())
    def test_forced(self, forced):
        assert self.run("print(_native.isa())", MOSAIC_ISA=forced).stdout.strip() == forced

    @pytest.mark.parametrize("call", ["_native.isa()", "_native.e4m3_decode(b'', bytearray())"])
    def test_forced_to_what_is_not_there(self, call):
        result = self.run(call, MOSAIC_ISA="AVX9")
        assert result.returncode == 1
        message = result.stderr.splitlines()[-1]
        assert message.startswith("ValueError: the environment variable MOSAIC_ISA is 'AVX9', expected")
        assert message.endswith(f": {', '.join(_native.isas())}; unset it to use the fastest of them")

    def test_unknown_argument(self):
        with pytest.raises(ValueError, match=r"isa is 'neon', expected one that .* have: scalar"):
            _native.e4m3_decode(b"", np.empty(0, np.float32), "neon")


def test_every_isa_of_this_cpu_is_offered():
    """By what the kernel says of the CPU: a dispatch that finds too little would only look slow."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    flags = set(lines[0].split()) if lines else set()
    expected = ["scalar"]
    if {"avx2", "fma", "f16c"} <= flags:
        expected.append("avx2")
    if {"avx2", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_bf16"} <= flags:
        expected.append("avx512")
        if {"amx_tile", "amx_bf16"} <= flags:
            expected.append("amx")
    assert list(_native.isas()) == expected
