"""Profiles: every figure says where it is from, and what is no profile is refused with the place."""

import re

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.hardware import EXAMPLE, FOLDER, Hardware, Memory, known, load
from mosaic.runtime.hardware.plain_yaml import MAX_BYTES

TEXT = (FOLDER / f"{EXAMPLE}.yaml").read_text()


def test_the_ones_that_come_with_mosaic():
    assert known() == ["cpu-laptop", "rtx3060-12gb", "rtx4060-laptop", "rtx4090-desktop", "rtx5070-laptop"]
    for name in known():
        profile = load(name)
        assert isinstance(profile, Hardware)
        assert (profile.gpu is None) == (name == "cpu-laptop")
        assert profile.gpu is None or profile.gpu.memory.rate > profile.ram.rate


@pytest.mark.parametrize("name", known())
def test_every_figure_says_whether_it_was_published_or_assumed(name):
    figures = [line for line in (FOLDER / f"{name}.yaml").read_text().splitlines() if re.match(r" +\w+: [\d.]", line)]
    assert len(figures) >= 7
    for line in figures:
        assert re.search(r"# (published|assumed)\b", line), line
        assert "measured" not in line


def test_units(tmp_path):
    memory = Memory(size_gib=8, reserved_gib=0.5, read_gb_s=256, read_share=0.75)
    assert (memory.nbytes, memory.usable) == (8 << 30, 15 << 29)
    assert memory.rate == 192e9


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine"
    file.write_text(TEXT.replace("size_gib: 8 ", "size_gib: 6 "))
    assert load(str(file)).gpu.memory.size_gib == 6
    assert load(EXAMPLE).gpu.memory.size_gib == 8


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("size_gib: 8 ", "size_gib: -8 ", "size_gib: found -8"),
        ("size_gib: 8 ", "size_gib: .nan ", "size_gib: found nan"),
        ("size_gib: 8 ", "size_gib: .inf ", "size_gib: found inf"),
        ("size_gib: 8 ", f"size_gib: 1{'0' * 400} ", "too large"),
        ("size_gib: 8 ", f"size_gib: 1{'0' * 5000} ", "digits"),
        ("size_gib: 8 ", "size_gib: 8GiB ", "memory.size_gib: found '8GiB'"),
        ("size_gib: 8 ", "size_gib: true ", "memory.size_gib: found True"),
        ("size_gib: 8 ", "sizes_gib: 8 ", "sizes_gib"),
        ("reserved_gib: 0.9", "reserved_gib: 8", "reserved_gib: found 8.0 of 8.0"),
        ("reserved_gib: 0.9", "reserved_gib: -1", "reserved_gib: found -1"),
        ("read_share: 0.7", "read_share: 1.1", "read_share: found 1.1"),
        ("pcie_gb_s: 12.5", "pcie_gb_s: 0", "pcie_gb_s: found 0"),
        ("token_us: 500 ", "token_us: 0 ", "token_us: found 0"),
        ("read_gb_s: 3.5 ", "read_gb_s: 1e99 ", "found '1e99'"),
        ("read_gb_s: 3.5 ", "read_gb_s: 1.0e+99 ", "read_gb_s: found 1e+99"),
        ("layer_us: 60 ", "layer_us: 60\n  layer_us: 61 ", "line 10: the key 'layer_us' stands twice"),
        ("gpu:", "gpu: &here", "line 2: an anchor or a tag"),
        ("title: ", "title: *here ", "an alias"),
        ("title: ", "title: !!str ", "an anchor or a tag"),
        ("title: ", 'title: "\\e[31m" # ', "title: not printable"),
        ("disk:", "--- disk:", "line 19: but found another document"),
        ("ram:\n", "ram: [[[[\n", "line"),
        (TEXT, "[" * 20_000, "recursion"),
        (TEXT, "", "found None"),
        (TEXT, "gpu", "found gpu"),
        (TEXT, "? [1, 2]\n: 3", "unhashable"),
        (TEXT, " " * (MAX_BYTES + 1), "more than 65,536 bytes"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, old, new, words):
    file = tmp_path / "mine.yaml"
    assert old in TEXT
    file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load(str(file))
    assert words in caught.value.facts["found"]
    assert caught.value.facts["file"] == str(file)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"title: \xff")
    with pytest.raises(InputError, match="cannot read a hardware profile"):
        load(str(file))


@pytest.mark.parametrize("name", ["nowhere.yaml", "."])
def test_what_is_no_file_is_refused(name):
    with pytest.raises(InputError, match="cannot read a hardware profile"):
        load(name)


def test_a_name_that_is_nearly_one():
    with pytest.raises(InputError, match="no such hardware profile") as caught:
        load("rtx4060")
    assert "did you mean rtx4060-laptop" in caught.value.facts["remedy"]
    with pytest.raises(InputError) as caught:
        load("abacus")
    assert "rtx3060-12gb" in caught.value.facts["expected"]
