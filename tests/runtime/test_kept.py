"""Figures in the cache folder: beside each other, and what is damaged is put aside and not lost."""

import json

import pytest

from mosaic.runtime.kept import keep, recall, try_to_keep

FILE = "figures.json"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mosaic"


def test_figures_are_kept_beside_others(folder, capsys):
    assert recall(FILE, "a") is None
    assert keep(FILE, "a", {"x": 1}) == keep(FILE, "b", {"x": 2}) == folder / FILE
    keep(FILE, "a", {"x": 3})
    assert (recall(FILE, "a"), recall(FILE, "b"), recall(FILE, "c")) == ({"x": 3}, {"x": 2}, None)
    assert [file.name for file in folder.iterdir()] == [FILE]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000], ids=lambda data: repr(data[:9])
)
def test_what_is_damaged_is_put_aside_when_it_is_replaced(folder, capsys, damage):
    folder.mkdir()
    (folder / FILE).write_bytes(damage)
    assert recall(FILE, "a") is None
    assert (folder / FILE).read_bytes() == damage
    assert capsys.readouterr().err == ""
    keep(FILE, "a", {"x": 1})
    assert json.loads((folder / FILE).read_text()) == {"a": {"x": 1}}
    assert (folder / f"{FILE}.damaged").read_bytes() == damage
    assert capsys.readouterr().err == f"note: {folder / FILE} could not be read, and is now {FILE}.damaged\n"


def test_a_trial_leaves_nothing(folder):
    assert try_to_keep(FILE) == folder / FILE
    assert list(folder.iterdir()) == []


def test_a_folder_in_the_files_place_stays(folder):
    (folder / FILE).mkdir(parents=True)
    assert recall(FILE, "a") is None
    for call in (lambda: try_to_keep(FILE), lambda: keep(FILE, "a", {})):
        with pytest.raises(IsADirectoryError):
            call()
    assert [file.name for file in folder.iterdir()] == [FILE]
