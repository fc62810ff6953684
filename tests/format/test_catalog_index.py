"""mosaic.json and experts.npy: round trips, and everything that is not one of them refused by name."""

import io
import json
import os
import pickle
import zipfile
import zlib

import numpy as np
import pytest

from mosaic.format import architectures, index
from mosaic.format.catalog import CATALOG_FILE, FORMAT_VERSION, Catalog, FileRecord, read_catalog, write_durably
from mosaic.format.errors import InputError
from support.tiny import Tiny, config

NOT_REFUSED = pytest.fail.Exception  # what pytest.raises raises when nothing was
DIGEST = "0123456789abcdef" * 4


def spec():
    values = config(Tiny())
    return architectures.find(values, "config.json").parse(values, "config.json")


def catalog():
    files = {"config.json": FileRecord(10, DIGEST), "layers-00.safetensors": FileRecord(2**40, DIGEST[::-1])}
    return Catalog(spec(), "e4m3", DIGEST, DIGEST[1:] + "0", DIGEST[2:] + "00", files)


def written(folder, change=None):
    """The catalog as JSON values, changed, and written back."""
    catalog().write(folder)
    file = folder / CATALOG_FILE
    if change:
        value = json.loads(file.read_text())
        replaced = change(value)
        file.write_text(json.dumps(value if replaced is None else replaced))
    return file


class TestCatalog:
    def test_round_trip(self, tmp_path):
        written(tmp_path)
        assert read_catalog(tmp_path) == catalog()
        assert [file.name for file in tmp_path.iterdir()] == [CATALOG_FILE]

    def test_the_keys_are_those_of_the_format(self, tmp_path):
        value = json.loads(written(tmp_path).read_text())
        assert list(value) == [
            "format_version",
            "spec",
            "recipe",
            "recipe_digest",
            "source_fingerprint",
            "plan_digest",
            "files",
        ]
        assert value["format_version"] == FORMAT_VERSION == 1
        assert value["files"]["config.json"] == {"nbytes": 10, "sha256": DIGEST}

    def test_no_directory(self, tmp_path):
        with pytest.raises(InputError, match="no such model directory"):
            read_catalog(tmp_path / "absent")

    def test_no_catalog(self, tmp_path):
        with pytest.raises(InputError, match=r"no mosaic\.json"):
            read_catalog(tmp_path)

    def test_an_unfinished_conversion(self, tmp_path):
        (tmp_path / ".mosaic-convert").mkdir()
        with pytest.raises(InputError, match="unfinished") as refusal:
            read_catalog(tmp_path)
        assert "again" in refusal.value.facts["remedy"]

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b"[]", b"null", b'"x"', b"1"])
    def test_not_a_json_object(self, tmp_path, content):
        (tmp_path / CATALOG_FILE).write_bytes(content)
        with pytest.raises(InputError, match=r"mosaic\.json"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize("version", [0, 2, "1", None, [], {}, 1.5, -1])
    def test_another_version(self, tmp_path, version):
        written(tmp_path, lambda value: value.update(format_version=version))
        with pytest.raises(InputError, match="format version") as refusal:
            read_catalog(tmp_path)
        assert refusal.value.facts["expected"] == "1"

    def test_no_version(self, tmp_path):
        written(tmp_path, lambda value: value.pop("format_version") and None)
        with pytest.raises(InputError, match="format version"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize("key", list(Catalog.__dataclass_fields__))
    def test_a_missing_key(self, tmp_path, key):
        written(tmp_path, lambda value: value.pop(key) and None)
        with pytest.raises(InputError, match="not a sound catalog"):
            read_catalog(tmp_path)

    def test_an_unknown_key(self, tmp_path):
        written(tmp_path, lambda value: value.update(created="today"))
        with pytest.raises(InputError, match="created"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize("spec", [None, [], "x", {}, {"hidden_size": 1}])
    def test_a_spec_that_is_none(self, tmp_path, spec):
        written(tmp_path, lambda value: value.update(spec=spec))
        with pytest.raises(InputError, match="not a sound catalog") as refusal:
            read_catalog(tmp_path)
        assert "spec" in refusal.value.facts["found"]

    @pytest.mark.parametrize(
        "name", ["../x", "a/b", "/etc/passwd", "./config.json", "layers-00.safetensors/", "../../etc/passwd"]
    )
    def test_a_file_outside_the_directory(self, tmp_path, name):
        written(tmp_path, lambda value: value["files"].update({name: {"nbytes": 1, "sha256": DIGEST}}))
        with pytest.raises(InputError, match="not a sound catalog") as refusal:
            read_catalog(tmp_path)
        assert name in str(refusal.value)

    @pytest.mark.parametrize("name", ["", ".."])
    def test_a_name_that_is_no_file(self, tmp_path, name):
        """With --overwrite these names are unlinked."""
        written(tmp_path, lambda value: value["files"].update({name: {"nbytes": 1, "sha256": DIGEST}}))
        with pytest.raises(InputError, match="not a sound catalog"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize(
        "record",
        [
            None,
            5,
            "x",
            [],
            {},
            ["nbytes", "sha256"],
            {"nbytes": 1},
            {"nbytes": "1", "sha256": DIGEST},
            {"nbytes": 1.0, "sha256": DIGEST},
            {"nbytes": True, "sha256": DIGEST},
            {"nbytes": 1, "sha256": DIGEST, "mtime": 0},
        ],
        ids=str,
    )
    def test_a_wrong_file_record(self, tmp_path, record):
        written(tmp_path, lambda value: value["files"].update({"config.json": record}))
        with pytest.raises(InputError, match="not a sound catalog"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize("key", ["recipe", "recipe_digest", "source_fingerprint", "plan_digest"])
    def test_a_wrong_type(self, tmp_path, key):
        written(tmp_path, lambda value: value.update({key: 5}))
        with pytest.raises(InputError, match="not a sound catalog"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize("record", [{"nbytes": -1, "sha256": DIGEST}, {"nbytes": 1, "sha256": 5}], ids=str)
    def test_a_record_of_nonsense(self, tmp_path, record):
        written(tmp_path, lambda value: value["files"].update({"config.json": record}))
        with pytest.raises(InputError, match="not a sound catalog"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize("files", [None, [], "x", 5], ids=str)
    def test_files_that_are_no_object(self, tmp_path, files):
        written(tmp_path, lambda value: value.update(files=files))
        with pytest.raises(InputError, match="not a sound catalog"):
            read_catalog(tmp_path)

    @pytest.mark.parametrize("version", [True, 1.0])
    def test_a_version_that_is_no_integer(self, tmp_path, version):
        written(tmp_path, lambda value: value.update(format_version=version))
        with pytest.raises(InputError, match="format version"):
            read_catalog(tmp_path)

    def test_written_durably_or_not_at_all(self, tmp_path, monkeypatch):
        """A write that fails leaves the old content alone, and syncs before it renames."""
        file = tmp_path / "x"
        write_durably(file, b"old")
        order = []
        replace, fsync = os.replace, os.fsync
        monkeypatch.setattr(os, "fsync", lambda number: (order.append("fsync"), fsync(number))[1])
        monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names))[1])
        write_durably(file, b"new")
        assert file.read_bytes() == b"new"
        assert order[0] == "fsync"

        def full(number):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_durably(file, b"newer")
        assert file.read_bytes() == b"new"


def row(layer=0, expert=0, offset=4096):
    return (
        layer,
        expert,
        "layers-00.safetensors",
        "F8_E4M3",
        "BF16",
        offset,
        16384,
        16384,
        16384,
        2**40,
        48,
        0xDEADBEEF,
    )


ROWS = [row(layer, expert, 2**40 + expert) for layer in range(3) for expert in range(4)]


def saved(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def zipped(array):
    stream = io.BytesIO()
    np.savez(stream, array=array)
    return stream.getvalue()


CONTENTS = {
    "empty": b"",
    "text": b"not numpy at all",
    "magic only": b"\x93NUMPY\x01\x00",
    "pickled objects": saved(np.array([{"a": 1}, None], object), allow_pickle=True),
    "a pickle": pickle.dumps([1, 2]),
    "another dtype": saved(np.zeros(4, np.float32)),
    "bytes": saved(np.zeros(1248, np.uint8)),
    "big-endian": saved(np.array(ROWS, index.ROW.newbyteorder(">"))),
    "a column less": saved(np.zeros(4, index.ROW.descr[:-1])),
    "a column more": saved(np.zeros(4, [*index.ROW.descr, ("x", "<u4")])),
    "another order": saved(np.zeros(4, [index.ROW.descr[1], index.ROW.descr[0], *index.ROW.descr[2:]])),
    "another width": saved(np.zeros(4, [("layer", "<u4"), *index.ROW.descr[1:]])),
    "another name": saved(np.zeros(4, [("Layer", "<u2"), *index.ROW.descr[1:]])),
    "two dimensions": saved(np.array(ROWS, index.ROW).reshape(3, 4)),
    "no dimension": saved(np.array(ROWS[0], index.ROW)),
    "cut short": index.to_bytes(ROWS)[:-1],
    "header cut short": index.to_bytes(ROWS)[:90],
}


class TestExpertIndex:
    def test_round_trip(self, tmp_path):
        file = tmp_path / index.EXPERTS_FILE
        file.write_bytes(index.to_bytes(ROWS))
        rows = index.read_index(file)
        assert [(*r[:2], r[2].decode(), r[3].decode(), r[4].decode(), *r[5:]) for r in rows.tolist()] == ROWS

    def test_the_bytes_are_those_of_the_format(self):
        """docs/FORMAT.md section 5: the columns in order, little-endian, packed."""
        rows = np.load(io.BytesIO(index.to_bytes(ROWS)), allow_pickle=False)
        assert rows.dtype.descr == [
            ("layer", "<u2"),
            ("expert", "<u2"),
            ("shard", "|S32"),
            ("code_dtype", "|S8"),
            ("scale_dtype", "|S8"),
            ("offset", "<u8"),
            ("gate_nbytes", "<u8"),
            ("up_nbytes", "<u8"),
            ("down_nbytes", "<u8"),
            ("scale_offset", "<u8"),
            ("scale_nbytes", "<u8"),
            ("crc32c", "<u4"),
        ]
        assert rows.dtype.itemsize == 104
        assert rows.shape == (12,)

    def test_no_rows(self, tmp_path):
        file = tmp_path / "experts.npy"
        file.write_bytes(index.to_bytes([]))
        assert len(index.read_index(file)) == 0

    @pytest.mark.parametrize("case", CONTENTS)
    def test_refused(self, tmp_path, case):
        file = tmp_path / "experts.npy"
        file.write_bytes(CONTENTS[case])
        with pytest.raises(InputError, match="not an expert index") as refusal:
            index.read_index(file)
        assert refusal.value.facts["file"] == str(file)
        assert "remedy" in refusal.value.facts

    def test_absent(self, tmp_path):
        with pytest.raises(InputError, match=r"experts\.npy"):
            index.read_index(tmp_path / "experts.npy")

    def test_a_pickle_is_not_executed(self, tmp_path):
        class Touch:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "executed"),))

        for content in (pickle.dumps(Touch()), saved(np.array([Touch()], object), allow_pickle=True)):
            (tmp_path / "experts.npy").write_bytes(content)
            with pytest.raises(InputError):
                index.read_index(tmp_path / "experts.npy")
        assert not (tmp_path / "executed").exists()

    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    def test_an_archive(self, tmp_path):
        file = tmp_path / "experts.npy"
        file.write_bytes(zipped(np.array(ROWS, index.ROW)))
        with pytest.raises(InputError, match="not an expert index"):
            index.read_index(file)

    def test_a_broken_archive(self, tmp_path):
        file = tmp_path / "experts.npy"
        file.write_bytes(b"PK\x03\x04 but no archive")
        assert not zipfile.is_zipfile(file)
        with pytest.raises(InputError, match="not an expert index"):
            index.read_index(file)

    def test_a_header_that_promises_too_much(self, tmp_path):
        file = tmp_path / "experts.npy"
        promise = b"(%d,), }" % 2**50
        good = index.to_bytes(ROWS)
        file.write_bytes(good.replace(b"(12,), }".ljust(len(promise)), promise, 1))
        assert promise in file.read_bytes()
        with pytest.raises(InputError, match="not an expert index"):
            index.read_index(file)

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_changed_header_byte_never_escapes_as_another_error(self, tmp_path):
        good = index.to_bytes(ROWS)
        file = tmp_path / "experts.npy"
        refused = 0
        for position in range(len(good) - len(ROWS) * index.ROW.itemsize):
            for byte in (0x00, 0x27, 0x28, 0x41, 0xFF):
                file.write_bytes(good[:position] + bytes([byte]) + good[position + 1 :])
                try:
                    rows = index.read_index(file)
                except InputError:
                    refused += 1
                    continue
                assert rows.dtype == index.ROW
        assert refused > 1000


class TestCrc32c:
    """Castagnoli, not the CRC-32 of zlib; check values of RFC 3720, appendix B.4."""

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"", 0),
            (b"123456789", 0xE3069283),
            (bytes(32), 0x8A9136AA),
            (b"\xff" * 32, 0x62A8AB43),
            (bytes(range(32)), 0x46DD794E),
        ],
    )
    def test_check_values(self, data, expected):
        assert index.crc32c(data) == expected
        assert not data or zlib.crc32(data) != expected

    def test_continues(self):
        assert index.crc32c(memoryview(b"6789"), index.crc32c(b"12345")) == 0xE3069283
