"""Shards against the safetensors library: what we write it reads, what it refuses we refuse, saying why.

The library is more lenient than we are in a few places (LENIENT); it is never to be stricter, or a shard could pass
`mosaic-verify` which no engine opens.
"""

import hashlib
import json
import os
import struct

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from mosaic.format.errors import InputError
from mosaic.format.layout import PAGE, Entry, Stored, header, layer_file, shard_layout
from mosaic.format.shard import read_header, read_with_metadata
from mosaic.format.shard_writer import ShardWriter
from mosaic.format.tensors import Part, Role, TensorSpec


def raw(head, data=b"", length=None):
    """A file with this header text."""
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def table(data=b"", /, **tensors):
    return raw(json.dumps(tensors).encode(), data)


def tensor(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def library_accepts(file):
    """Whether the safetensors library opens the file and hands out every tensor."""
    try:
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                opened.get_slice(name).get_shape()
    except Exception:
        return False
    return True


FOUR = b"\1\2\3\4"
ENTRY = json.dumps(tensor()).encode()

#: name: (bytes of the file, what the message must show besides the file).
HOSTILE = {
    "empty file": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "header length 0": (raw(b"", b"", 0), "header of 0"),
    "header length 0 before a header": (raw(b"{}", b"", 0), "header of 0"),
    "header length 2**63": (raw(json.dumps({"a": tensor()}).encode(), FOUR, 2**63), str(2**63)),
    "header length 2**64 - 1": (raw(b"{}", b"", 2**64 - 1), str(2**64 - 1)),
    "header beyond the library's limit": (raw(b"{}", b"", 100_000_001), "100000001"),
    "header beyond the file": (raw(json.dumps({"a": tensor()}).encode(), FOUR, 1000), "header of 1000"),
    "not JSON": (raw(b'{"a":'), "not JSON"),
    "text": (raw(b"this is a download error page"), "not JSON"),
    "trailing comma": (raw(b'{"a":' + ENTRY + b",}", FOUR), "not JSON"),
    "zeros after the header": (raw(b'{"a":' + ENTRY + b"}\0\0", FOUR), "not JSON"),
    "not UTF-8": (raw(b'{"\xff\xfe":' + ENTRY + b"}", FOUR), "not JSON"),
    "control character in a name": (raw(b'{"a\1":' + ENTRY + b"}", FOUR), "not JSON"),
    "a list": (raw(b"[1, 2]"), "no JSON object"),
    "a number": (raw(b"12"), "no JSON object"),
    "deep nesting": (raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not JSON"),
    "deep nesting in metadata": (raw(b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not JSON"),
    "a name twice": (raw(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", FOUR), "twice"),
    "metadata twice": (raw(b'{"__metadata__":{},"__metadata__":{},"a":' + ENTRY + b"}", FOUR), "twice"),
    "dtype twice": (raw(b'{"a":{"dtype":"F32",' + ENTRY[1:] + b"}", FOUR), "twice"),
    "null for a tensor": (table(a=None), "tensor:   a"),
    "a list for a tensor": (table(a=[]), "tensor:   a"),
    "a string for a tensor": (table(a="F32"), "tensor:   a"),
    "unknown dtype": (table(FOUR, a=tensor("F31")), "F31"),
    "lower case dtype": (table(FOUR, a=tensor("f32")), "f32"),
    "number for a dtype": (table(FOUR, a=tensor(1)), "tensor:   a"),
    "null for a dtype": (table(FOUR, a=tensor(None)), "tensor:   a"),
    "negative shape": (table(FOUR, a=tensor(shape=[-1])), "[-1]"),
    "two negative sizes": (table(FOUR, a=tensor(shape=[-1, -1])), "[-1, -1]"),
    "float shape": (table(FOUR, a=tensor(shape=[1.0])), "[1.0]"),
    "bool shape": (table(FOUR, a=tensor(shape=[True])), "[True]"),
    "string shape": (table(FOUR, a={**tensor(), "shape": "1"}), "tensor:   a"),
    "NaN in a shape": (raw(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', FOUR), "tensor:   a"),
    "a size of 5000 digits": (
        raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', FOUR),
        "",
    ),
    "offsets reversed": (table(FOUR, a=tensor(offsets=[4, 0])), "[4, 0]"),
    "negative offset": (table(FOUR, a=tensor(offsets=[-4, 0])), "[-4, 0]"),
    "float offset": (table(FOUR, a=tensor(offsets=[0, 4.0])), "[0, 4.0]"),
    "one offset": (table(FOUR, a=tensor(offsets=[4])), "[4]"),
    "three offsets": (table(FOUR, a=tensor(offsets=[0, 4, 8])), "[0, 4, 8]"),
    "shape and offsets disagree": (table(FOUR, a=tensor(shape=[2])), "8"),
    "product overflow": (table(FOUR, a=tensor(shape=[2**40, 2**40])), "below 2^63"),
    "product overflow to 0": (table(a=tensor(shape=[2**62], offsets=[0, 0])), "tensor:   a"),
    "a size of 2**63": (table(a=tensor(shape=[2**63, 0], offsets=[0, 0])), "tensor:   a"),
    "gap at the start": (table(FOUR * 2, a=tensor(offsets=[4, 8])), "tensor:   a"),
    "gap": (table(FOUR * 3, a=tensor(), b=tensor(offsets=[8, 12])), "tensor:   b"),
    "overlap": (table(FOUR + b"56", a=tensor(), b=tensor(offsets=[2, 6])), "tensor:   b"),
    "two tensors at one place": (table(FOUR, a=tensor(), b=tensor()), "tensor:"),
    "beyond the end": (table(b"12", a=tensor()), "bytes by its header"),
    "far beyond the end": (table(FOUR, a=tensor("U8", [2**50], [0, 2**50])), "bytes by its header"),
    "trailing byte": (table(FOUR + b"5", a=tensor()), "bytes by its header"),
    "data without tensors": (raw(b"{}", FOUR), "bytes by its header"),
    "no dtype": (table(FOUR, a={"shape": [1], "data_offsets": [0, 4]}), "tensor:   a"),
    "no shape": (table(FOUR, a={"dtype": "F32", "data_offsets": [0, 4]}), "tensor:   a"),
    "no offsets": (table(FOUR, a={"dtype": "F32", "shape": [1]}), "tensor:   a"),
    "an extra key": (table(FOUR, a=tensor(strides=[1])), "strides"),
}

#: What the library opens all the same: here a file can mean two things, or a tensor of no bytes is absurdly large.
LENIENT = {"a name twice", "an extra key", "a size of 2**63"}

#: The library refuses these; read_header must too.
REFUSED_BY_THE_LIBRARY = {
    "UTF-16": (raw(json.dumps({"a": tensor()}).encode("utf-16-le"), FOUR), "json.loads guesses the encoding"),
    "UTF-32": (raw(json.dumps({"a": tensor()}).encode("utf-32-be"), FOUR), "json.loads guesses the encoding"),
    "byte order mark": (raw(b"\xef\xbb\xbf" + b'{"a":' + ENTRY + b"}", FOUR), "json.loads drops it"),
    "surrogate in UTF-8": (
        raw(b'{"\xed\xa0\x80":' + ENTRY + b"}", FOUR),
        "json.loads of bytes decodes with surrogatepass",
    ),
    "lone surrogate, escaped": (raw(b'{"\\ud800":' + ENTRY + b"}", FOUR), "json.loads accepts it"),
    "overflow times 0": (
        table(a=tensor(shape=[2**40, 2**40, 0], offsets=[0, 0])),
        "Python's integers do not overflow",
    ),
    "minus 0": (
        raw(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
        "json.loads reads -0 as the integer 0",
    ),
    "number in metadata": (table(FOUR, __metadata__={"x": 1}, a=tensor()), "__metadata__ is not looked at"),
    "object in metadata": (table(FOUR, __metadata__={"x": {}}, a=tensor()), "__metadata__ is not looked at"),
    "list for metadata": (table(FOUR, __metadata__=[], a=tensor()), "__metadata__ is not looked at"),
    "string for metadata": (table(FOUR, __metadata__="pt", a=tensor()), "__metadata__ is not looked at"),
    "list for a dtype": (table(FOUR, a=tensor([])), "TypeError: a list cannot be looked up in _WIDTH"),
    "object for a dtype": (table(FOUR, a=tensor({"F32": 1})), "TypeError: a dict cannot be looked up in _WIDTH"),
}


class TestHostileHeaders:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_refused_with_file_and_reason(self, tmp_path, case):
        content, shown = HOSTILE[case]
        file = tmp_path / "hostile.safetensors"
        file.write_bytes(content)
        with pytest.raises(InputError) as refusal:
            read_header(file)
        message = str(refusal.value)
        assert str(file) in message
        assert shown in message
        assert "remedy:" in message
        assert len(message) < 20_000
        assert library_accepts(file) == (case in LENIENT)

    @pytest.mark.parametrize("case", REFUSED_BY_THE_LIBRARY)
    def test_refused_because_the_library_refuses(self, tmp_path, case):
        content, _ = REFUSED_BY_THE_LIBRARY[case]
        file = tmp_path / "hostile.safetensors"
        file.write_bytes(content)
        assert not library_accepts(file)
        with pytest.raises(InputError, match=r"hostile\.safetensors"):
            read_header(file)

    def test_every_truncation(self, tmp_path):
        whole = save({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float16)})
        file = tmp_path / "cut.safetensors"
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            with pytest.raises(InputError):
                read_header(file)

    def test_a_changed_header_byte_never_escapes_as_another_error(self, tmp_path):
        """Every byte of a header replaced by some others: refused, or a table whose tensors lie in the file."""
        whole = save({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float16)})
        file = tmp_path / "changed.safetensors"
        length = int.from_bytes(whole[:8], "little")
        refused = 0
        for position in range(8 + length):
            for byte in (0x22, 0x39, 0x5B, 0xFF):
                file.write_bytes(whole[:position] + bytes([byte]) + whole[position + 1 :])
                try:
                    tensors = read_header(file)
                except InputError:
                    refused += 1
                    continue
                assert all(info.offset + info.nbytes <= len(whole) for info in tensors.values())
        assert refused > 300

    def test_no_file(self, tmp_path):
        with pytest.raises(InputError, match=r"absent\.safetensors"):
            read_header(tmp_path / "absent.safetensors")

    def test_a_directory(self, tmp_path):
        with pytest.raises(InputError, match="regular file"):
            read_header(tmp_path)

    def test_a_pipe(self, tmp_path):
        """Opening it would wait for ever."""
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(InputError, match="regular file"):
            read_header(tmp_path / "pipe.safetensors")


class TestLegalHeaders:
    """Files of others, unusual but sound: offsets count from the start of the file, and the bytes are the library's."""

    def read(self, tmp_path, content):
        file = tmp_path / "legal.safetensors"
        file.write_bytes(content)
        assert library_accepts(file)
        return read_header(file)

    def test_what_the_library_writes(self, tmp_path):
        tensors = {
            "z": np.arange(6, dtype=np.float32).reshape(2, 3),
            "a": np.arange(5, dtype=np.int64),
            "m.weight": np.arange(7, dtype=np.uint8),
            "bool": np.array([True, False]),
            "half": np.ones((3, 1, 2), np.float16),
        }
        content = save(tensors, {"format": "pt"})
        infos = self.read(tmp_path, content)
        assert infos.keys() == tensors.keys()
        for name, values in tensors.items():
            info = infos[name]
            assert info.shape == values.shape
            assert content[info.offset : info.offset + info.nbytes] == values.tobytes()
        assert {info.dtype for info in infos.values()} == {"F32", "I64", "U8", "BOOL", "F16"}

    def test_metadata_is_no_tensor(self, tmp_path):
        assert self.read(tmp_path, table(FOUR, __metadata__={"format": "pt", "é": "日本"}, a=tensor())).keys() == {"a"}

    def test_no_tensors(self, tmp_path):
        assert self.read(tmp_path, raw(b"{}")) == {}

    def test_tensors_in_any_order(self, tmp_path):
        content = table(FOUR * 3, c=tensor(offsets=[8, 12]), a=tensor(offsets=[4, 8]), b=tensor(offsets=[0, 4]))
        infos = self.read(tmp_path, content)
        assert list(infos) == ["c", "a", "b"]
        start = len(content) - 12
        assert [info.offset - start for info in infos.values()] == [8, 4, 0]

    def test_empty_tensors_anywhere(self, tmp_path):
        empty = {"shape": [0], "offsets": [4, 4]}
        content = table(
            FOUR * 2, a=tensor(), e=tensor(**empty), b=tensor(offsets=[4, 8]), f=tensor("U8", [3, 0], [8, 8])
        )
        infos = self.read(tmp_path, content)
        assert [infos[name].nbytes for name in "aebf"] == [4, 0, 4, 0]
        assert infos["e"].shape == (0,)
        assert infos["f"].shape == (3, 0)

    def test_a_scalar(self, tmp_path):
        info = self.read(tmp_path, table(FOUR, a=tensor(shape=[])))["a"]
        assert (info.shape, info.nbytes) == ((), 4)

    @pytest.mark.parametrize("spaces", [0, 1, 3, 6])
    def test_unaligned_data_and_trailing_spaces(self, tmp_path, spaces):
        text = json.dumps({"a": tensor()}).encode() + b" " * spaces
        assert self.read(tmp_path, raw(text, FOUR))["a"].offset == 8 + len(text)

    def test_whitespace_around_the_header(self, tmp_path):
        assert self.read(tmp_path, raw(b'\n {"a":' + ENTRY + b"}\t\n", FOUR)).keys() == {"a"}

    def test_unusual_names(self, tmp_path):
        names = ["", "é", "a b", "../x", "日本", "a" * 5000]
        tensors = {name: tensor(offsets=[4 * i, 4 * i + 4]) for i, name in enumerate(names)}
        file = tmp_path / "legal.safetensors"
        file.write_bytes(raw(json.dumps(tensors, ensure_ascii=False).encode(), FOUR * len(names)))
        assert library_accepts(file)
        assert list(read_header(file)) == names

    @pytest.mark.parametrize("dtype", ["U16", "I16", "BF16", "F16", "U32", "I32", "F32", "U64", "I64", "F64"])
    def test_wide_dtypes(self, tmp_path, dtype):
        width = int(dtype[-2:]) // 8
        info = self.read(tmp_path, table(bytes(3 * width), a=tensor(dtype, [3], [0, 3 * width])))["a"]
        assert (info.dtype, info.nbytes) == (dtype, 3 * width)

    @pytest.mark.parametrize("dtype", ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
    def test_narrow_dtypes(self, tmp_path, dtype):
        assert self.read(tmp_path, table(FOUR, a=tensor(dtype, [2, 2])))["a"].dtype == dtype


def stored(name, shape, dtype, role, scale=None):
    spec = TensorSpec(name, name, shape, role, Part.DECODER, (), layer=3)
    grid = tuple(-(-size // 128) for size in shape)
    return Stored(spec, Entry(name, dtype, shape), Entry(f"{name}_scale_inv", scale, grid) if scale else None)


def one_of_everything(scale="BF16"):
    """Contract order: two experts, router, shared expert, norms."""
    experts = [
        stored(f"experts.{expert}.{kind}.weight", shape, "F8_E4M3", Role.ROUTED_EXPERTS, scale)
        for expert in range(2)
        for kind, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128)))
    ]
    return [
        *experts,
        stored("router.weight", (2, 256), "BF16", Role.ROUTER),
        stored("shared.weight", (128, 256), "F8_E4M3", Role.SHARED_EXPERT, scale),
        stored("a_log", (3,), "F32", Role.DECAY),
        stored("half", (5,), "F16", Role.NORM),
    ]


def write(folder, layout, values):
    temporary, final = folder / "temporary", folder / layout.file
    with ShardWriter(layout, temporary) as writer:
        for entry in layout.entries:
            data = np.frombuffer(values[entry.name], np.uint8)
            for part in (data[: len(data) // 3], data[len(data) // 3 :]):
                writer.room(len(part))[:] = part
                writer.add(entry.name, len(part))
        digest = writer.finish()
        assert not final.exists()
        writer.publish(final)
    assert not temporary.exists()
    return final, digest


class TestShardWriter:
    @pytest.mark.parametrize("scale", ["BF16", "F32"])
    def test_the_library_reads_the_same_bytes(self, tmp_path, scale):
        layout = shard_layout("layers-03.safetensors", one_of_everything(scale))
        rng = np.random.default_rng(0)
        values = {entry.name: rng.integers(0, 0x70, entry.nbytes, np.uint8).tobytes() for entry in layout.entries}
        file, digest = write(tmp_path, layout, values)
        assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
        assert file.stat().st_size == layout.nbytes
        import torch

        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == set(values)
            for entry in layout.entries:
                found = opened.get_tensor(entry.name)
                assert tuple(found.shape) == entry.shape
                assert found.contiguous().view(torch.uint8).numpy().tobytes() == values[entry.name]
        infos = read_header(file)
        assert {name: info.offset for name, info in infos.items()} == layout.offsets
        content = file.read_bytes()
        assert all(content[i.offset : i.offset + i.nbytes] == values[name] for name, i in infos.items())

    def test_order_and_alignment(self, tmp_path):
        layout = shard_layout("x.safetensors", one_of_everything())
        kinds = ("gate", "up", "down")
        spans = [f"experts.{expert}.{kind}.weight" for expert in range(2) for kind in kinds]
        scales = [f"{name}_scale_inv" for name in spans]
        rest = ["shared.weight", "a_log", *scales, "router.weight", "shared.weight_scale_inv", "half"]
        assert [entry.name for entry in layout.entries] == [*spans, *rest]
        assert layout.offsets[spans[0]] == len(layout.header)
        assert all(layout.offsets[name] % PAGE == 0 for name in spans)
        positions = [layout.offsets[entry.name] for entry in layout.entries]
        ends = [position + entry.nbytes for position, entry in zip(positions, layout.entries, strict=True)]
        assert ends[:-1] == positions[1:]

    def test_f32_scales_stand_with_the_f32_tensors(self):
        layout = shard_layout("x.safetensors", one_of_everything("F32"))
        kinds = [entry.dtype for entry in layout.entries]
        assert kinds == sorted(kinds, key=["F8_E4M3", "F32", "BF16", "F16"].index)

    @pytest.mark.parametrize("count", [0, 1, 39, 40, 41, 42, 200])
    def test_the_header_is_padded_to_a_page(self, count):
        """Around the place where the padding wraps to the next page, byte by byte."""
        for extra in range(110):
            entries = [Entry(f"{'x' * 40}{number:04}", "F32", (1,)) for number in range(count)]
            head = header([*entries, Entry("y" * extra, "F32", (1,))])
            text = head[8:]
            assert len(head) % PAGE == 0
            assert int.from_bytes(head[:8], "little") == len(text)
            assert len(text) - len(text.rstrip(b" ")) < PAGE
            assert text.startswith(b"{")

    def test_metadata_are_read_as_the_library_reads_them(self, tmp_path):
        file, metadata = tmp_path / "x.safetensors", {"said": 'Grüße "😀"', "format": "other"}
        for written in (metadata, {}):
            file.write_bytes(header([Entry("x", "I32", (1,))], written) + b"1234")
            assert read_with_metadata(file)[1] == written
            with safe_open(file, "numpy") as opened:
                assert (opened.metadata() or {}) == written
        file.write_bytes(header([Entry("x", "F32", (1,))]) + b"1234")
        assert read_with_metadata(file) == (read_header(file), {"format": "pt"})

    def test_layer_files_sort(self):
        assert layer_file(7, 40) == "layers-07.safetensors"
        assert layer_file(7, 1) == "layers-07.safetensors"
        names = [layer_file(layer, 101) for layer in range(101)]
        assert names == sorted(names)

    def test_an_exception_removes_the_temporary_file(self, tmp_path):
        layout = shard_layout("x.safetensors", one_of_everything())

        def fail():
            with ShardWriter(layout, tmp_path / "temporary") as writer:
                writer.add(layout.entries[0].name, layout.entries[0].nbytes)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("mistake", ["wrong tensor", "too few bytes", "too many bytes", "unfinished"])
    def test_our_own_mistakes_are_caught(self, tmp_path, mistake):
        layout = shard_layout("x.safetensors", one_of_everything())
        first = layout.entries[0]

        def misuse(writer):
            if mistake == "wrong tensor":
                writer.add(layout.entries[1].name, 1)
            elif mistake == "too few bytes":
                writer.add(first.name, first.nbytes - 1)
                writer.add(layout.entries[1].name, 1)
            elif mistake == "too many bytes":
                writer.add(first.name, first.nbytes - 1)
                writer.add(first.name, 2)
            else:
                writer.finish()

        with ShardWriter(layout, tmp_path / "temporary") as writer, pytest.raises(AssertionError):
            misuse(writer)
