"""mosaic-verify on damaged model directories: every invariant of docs/FORMAT.md has a mutation that it alone catches.

After a mutation the catalog is sealed anew (sizes and sha256 made right), and so are index offsets and CRCs where they
would give the damage away: what is left to find it is the check that is meant to. Without sealing, V2 finds everything.

Here: V1 to V5, of files; V6 to V12 in test_verify_tensors, V13 to V17 in test_verify_records.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mosaic.convert.verify import verify
from mosaic.format import index
from mosaic.format.errors import InputError
from support.damage import (
    ALL,
    FIRST,
    MTP,
    NORM,
    OUTSIDE,
    POST,
    QUERY,
    SECOND,
    Shard,
    change_json,
    index_again,
    list_again,
    only,
    seal,
    set_bytes,
    states,
)

MOSAIC_VERIFY = Path(sys.executable).with_name("mosaic-verify")


def test_a_sound_directory(model):
    assert states(model) == ({}, set())


def test_sealing_changes_nothing(model):
    """The helpers above leave a sound directory sound."""
    for file in model.glob("*.safetensors"):
        Shard(file).write()
    list_again(model)
    index_again(model)
    seal(model)
    assert states(model) == ({}, set())


def test_progress_counts_every_byte(model):
    counted = []
    verify(model, counted.append)
    assert sum(counted) == sum(f.stat().st_size for f in model.iterdir() if f.name != "mosaic.json")


class TestWithoutSealing:
    def test_a_flipped_byte_anywhere(self, model):
        """In every file but the catalog, at its ends and at places between."""
        rng = np.random.default_rng(0)
        for file in sorted(model.iterdir()):
            if file.name in ("mosaic.json", "experts.npy"):
                continue
            content = file.read_bytes()
            for place in {0, 8, len(content) - 1, *rng.integers(0, len(content), 4).tolist()}:
                file.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
                assert states(model)[0], f"{file.name} at {place}"
            file.write_bytes(content)
        assert states(model) == ({}, set())

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_a_flipped_bit_anywhere_in_a_row_of_the_index(self, model):
        file = model / "experts.npy"
        content = file.read_bytes()
        start = len(content) - 8 * index.ROW.itemsize
        for place in range(start, start + index.ROW.itemsize):
            for bit in (0x01, 0x80):
                file.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
                assert {"V2", "V14", "V15"} & states(model)[0].keys()

    def test_a_changed_value_in_the_catalog(self, model):
        good = json.loads((model / "mosaic.json").read_text())
        for name in good["files"]:
            for key, wrong in (("nbytes", good["files"][name]["nbytes"] + 1), ("sha256", "0" * 64)):
                value = json.loads(json.dumps(good))
                value["files"][name][key] = wrong
                (model / "mosaic.json").write_text(json.dumps(value))
                failures, _ = states(model)
                assert failures.keys() == {"V2"}
                assert name in failures["V2"][0]

    def test_every_file_is_missed(self, model):
        for file in sorted(model.iterdir()):
            if file.name == "mosaic.json":
                continue
            content = file.read_bytes()
            file.unlink()
            failures, _ = states(model)
            assert f"{file.name}: absent" in failures["V2"]
            file.write_bytes(content)

    @pytest.mark.parametrize("change", [-1, 1, 4096])
    def test_another_size(self, model, change):
        os.truncate(model / SECOND, (model / SECOND).stat().st_size + change)
        assert {"V2", "V4"} <= states(model)[0].keys()


class TestV1:
    @pytest.mark.parametrize(
        "change",
        [
            lambda value: value.update(format_version=2),
            lambda value: value.pop("plan_digest") and None,
            lambda value: value.update(extra=1),
            lambda value: value["spec"].pop("moe") and None,
            lambda value: value["files"].clear(),
        ],
        ids=["version", "missing key", "unknown key", "spec", "no files"],
    )
    def test_catalog(self, model, change):
        change_json(model / "mosaic.json", change)
        failures, unchecked = states(model)
        assert failures.keys() == {"V1"}
        assert unchecked == set(ALL) - {"V1"}

    @pytest.mark.parametrize("content", ["", "[]", "{"])
    def test_no_json_object(self, model, content):
        (model / "mosaic.json").write_text(content)
        assert states(model)[0].keys() == {"V1"}


class TestV2:
    def test_a_stray_shard(self, model):
        shutil.copy(model / MTP, model / "stray.safetensors")
        failures, _ = states(model)
        assert failures == {"V2": ["stray.safetensors: not in the catalog"]}

    def test_other_strays_are_none_of_ours(self, model):
        (model / "README.md").write_text("mine")
        assert states(model) == ({}, set())

    def test_a_companion(self, model):
        (model / "generation_config.json").write_text("{}")
        assert states(model)[0].keys() == {"V2"}


class TestV3:
    def test_the_catalog(self, model):
        change_json(model / "mosaic.json", lambda value: value["spec"].update(rms_norm_eps=1e-5))
        assert "1e-05" in only(model, "V3")

    def test_the_config(self, model):
        change_json(model / "config.json", lambda value: value["text_config"].update(num_experts_per_tok=3))
        only(model, "V3")

    def test_a_config_of_another_family(self, model):
        change_json(model / "config.json", lambda value: value.update(model_type="mixtral"))
        seal(model)
        assert "mixtral" in states(model)[0]["V3"][0]


class TestV4:
    @pytest.mark.parametrize("file", [FIRST, OUTSIDE, MTP])
    @pytest.mark.parametrize("change", [-1, 1])
    def test_size(self, model, file, change):
        os.truncate(model / file, (model / file).stat().st_size + change)
        assert file in only(model, "V4")

    def test_a_header_that_is_none(self, model):
        content = (model / FIRST).read_bytes()
        (model / FIRST).write_bytes(content[:8] + b"[" + content[9:])
        assert FIRST in only(model, "V4")

    def test_overlapping_tensors(self, model):
        content = (model / SECOND).read_bytes()
        table = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        table[POST]["data_offsets"] = table[NORM]["data_offsets"]
        length = int.from_bytes(content[:8], "little")
        (model / SECOND).write_bytes(
            content[:8] + json.dumps(table).encode().ljust(length)[:length] + content[8 + length :]
        )
        only(model, "V4")


class TestV5:
    @pytest.mark.parametrize("file", [OUTSIDE, MTP])
    @pytest.mark.parametrize("page", [1, 8])
    def test_unpadded(self, model, file, page):
        Shard(model / file).write(page)
        assert file in only(model, "V5")

    def test_a_shard_without_tensors(self, model):
        (model / "empty.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        change_json(
            model / "mosaic.json",
            lambda value: value["files"].update({"empty.safetensors": {"nbytes": 0, "sha256": ""}}),
        )
        only(model, "V5", "V6")


def verify_program(*arguments):
    return subprocess.run([MOSAIC_VERIFY, *map(str, arguments)], capture_output=True, text=True, timeout=60)


class TestProgram:
    def test_sound(self, model):
        done = verify_program(model)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"^(V\d+) +ok", done.stdout, re.MULTILINE) == ALL
        assert "damaged" not in done.stderr

    def test_damaged(self, model):
        set_bytes(model, SECOND, QUERY, 5, b"\x7f")
        done = verify_program(model)
        assert done.returncode == 1
        assert re.findall(r"^(V\d+) +FAILED", done.stdout, re.MULTILINE) == ["V2", "V10", "V17"]
        assert QUERY in done.stdout
        assert "Traceback" not in done.stderr

    def test_json(self, model):
        os.truncate(model / FIRST, 100)
        done = verify_program(model, "--json")
        assert done.returncode == 1
        value = json.loads(done.stdout)
        assert value["sound"] is False
        found = {entry["invariant"]: (entry["checked"], bool(entry["failures"])) for entry in value["invariants"]}
        assert found["V4"] == (True, True)
        assert found["V10"] == (False, False)

    @pytest.mark.parametrize("kind", ["absent", "a file", "empty", "checkpoint", "unfinished"])
    def test_no_model_directory(self, originals, tmp_path, kind):
        folder = tmp_path / "folder"
        if kind == "a file":
            folder.write_text("")
        elif kind == "checkpoint":
            folder = originals / "bf16"
        elif kind != "absent":
            folder.mkdir()
        if kind == "unfinished":
            (folder / ".mosaic-convert").mkdir()
        done = verify_program(folder)
        assert done.returncode == 2
        assert done.stdout == ""
        assert str(folder) in done.stderr
        assert "remedy:" in done.stderr
        with pytest.raises(InputError):
            verify(folder)

    @pytest.mark.parametrize("arguments", [[], ["OUT", "--demo"], ["--no-such-option"]], ids=str)
    def test_what_to_check_is_not_clear(self, arguments):
        assert verify_program(*arguments).returncode == 2
