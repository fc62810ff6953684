"""mosaic-verify on damaged model directories: every invariant of docs/FORMAT.md has a mutation that it alone catches.

After a mutation the catalog is sealed anew (sizes and sha256 made right), and so are index offsets and CRCs where they
would give the damage away: what is left to find it is the check that is meant to. Without sealing, V2 finds everything.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.convert.verify import verify
from mosaic.format import index
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint

MOSAIC_VERIFY = Path(sys.executable).with_name("mosaic-verify")
INDEX = "model.safetensors.index.json"
ALL = [f"V{number}" for number in range(1, 18)]
ITEM = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "I16": 2, "F32": 4}

TEXT = "model.language_model."
FIRST, SECOND, OUTSIDE, MTP = "layers-00.safetensors", "layers-01.safetensors", "outside.safetensors", "mtp.safetensors"
NORM = f"{TEXT}layers.1.input_layernorm.weight"
POST = f"{TEXT}layers.1.post_attention_layernorm.weight"
QUERY = f"{TEXT}layers.1.self_attn.q_proj.weight"
KEY = f"{TEXT}layers.1.self_attn.k_proj.weight"
EXPERT = f"{TEXT}layers.1.mlp.experts.2.up_proj.weight"


# ---------------------------------------------------------------------------------------- changing a model directory


class Shard:
    """A shard as a list of [name, dtype, shape, bytes] in file order. Its own reader and writer, not Mosaic's."""

    def __init__(self, file):
        self.file = file
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        table = json.loads(content[8 : 8 + length])
        self.metadata = table.pop("__metadata__")
        data = content[8 + length :]
        entries = sorted(table.items(), key=lambda item: item[1]["data_offsets"])
        self.entries = [
            [name, e["dtype"], e["shape"], data[e["data_offsets"][0] : e["data_offsets"][1]]] for name, e in entries
        ]

    def place(self, name):
        return next(i for i, entry in enumerate(self.entries) if entry[0] == name)

    def __getitem__(self, name):
        return self.entries[self.place(name)]

    def write(self, page=4096):
        table, end = {"__metadata__": self.metadata}, 0
        for name, dtype, shape, data in self.entries:
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
            end += len(data)
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % page)
        self.file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(entry[3] for entry in self.entries))


def change_json(file, change):
    value = json.loads(file.read_text())
    replaced = change(value)
    file.write_text(json.dumps(value if replaced is None else replaced))


def set_bytes(model, file, name, position, data):
    """Overwrite bytes of one tensor."""
    shard = Shard(model / file)
    entry = shard[name]
    entry[3] = entry[3][:position] + data + entry[3][position + len(data) :]
    shard.write()


def list_again(model):
    """Make model.safetensors.index.json what the shards hold."""
    shards = [Shard(file) for file in sorted(model.glob("*.safetensors"))]
    weight_map = {entry[0]: shard.file.name for shard in shards for entry in shard.entries}
    total = sum(len(entry[3]) for shard in shards for entry in shard.entries)
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def index_again(model):
    """Make offsets and CRCs of experts.npy what the shards hold; shapes and dtypes as they were."""
    rows = np.load(model / "experts.npy")
    for row in rows:
        file = model / row["shard"].decode()
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        table = json.loads(content[8:start])
        base = next(
            re.sub(r"gate_proj\.weight$", "", name)
            for name in table
            if name.endswith(f".layers.{row['layer']}.mlp.experts.{row['expert']}.gate_proj.weight")
        )
        row["offset"] = start + table[f"{base}gate_proj.weight"]["data_offsets"][0]
        row["scale_offset"] = start + table[f"{base}gate_proj.weight_scale_inv"]["data_offsets"][0]
        span = int(row["gate_nbytes"] + row["up_nbytes"] + row["down_nbytes"])
        data = content[int(row["offset"]) :][:span]
        row["crc32c"] = index.crc32c(data + content[int(row["scale_offset"]) :][: int(row["scale_nbytes"])])
    np.save(model / "experts.npy", rows)


def seal(model):
    """Make sizes and sha256 in the catalog those of the files."""

    def change(value):
        for name in list(value["files"]):
            data = (model / name).read_bytes()
            value["files"][name] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    change_json(model / "mosaic.json", change)


def states(model):
    """({invariant: failures} of what was found false, what was not checked)."""
    results = verify(model)
    assert sorted(result.invariant for result in results) == sorted(ALL)
    return (
        {result.invariant: result.failures for result in results if result.checked and not result.holds},
        {result.invariant for result in results if not result.checked},
    )


def only(model, invariant, *also):
    """The sealed directory breaks this invariant, and no other but those that come with it.

    V17 comes with whatever changes a code, a scale or the report; it has tests of its own.
    """
    seal(model)
    failures, unchecked = states(model)
    assert invariant in failures
    assert not failures.keys() - {invariant, "V17", *also}, failures
    if invariant not in ("V1", "V4", "V6"):
        assert not unchecked
    assert all(text for texts in failures.values() for text in texts)
    return "\n".join(failures[invariant])


# ------------------------------------------------------------------------------------------------------ the sound one


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


# ------------------------------------------------------------------------------------------------- flipped and lost


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


# ------------------------------------------------------------------------------------------------- one after the other


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


class TestV6:
    def test_missing_everywhere(self, model):
        shard = Shard(model / SECOND)
        del shard.entries[shard.place(NORM)]
        shard.write()
        list_again(model)
        index_again(model)
        assert f"{NORM}: absent" in only(model, "V6")

    def test_missing_in_the_index(self, model):
        change_json(model / INDEX, lambda value: value["weight_map"].pop(NORM) and None)
        assert NORM in only(model, "V6")

    def test_listed_but_not_there(self, model):
        change_json(model / INDEX, lambda value: value["weight_map"].update({"x.weight": SECOND}))
        assert "x.weight" in only(model, "V6")

    def test_listed_in_another_file(self, model):
        change_json(model / INDEX, lambda value: value["weight_map"].update({NORM: FIRST}))
        assert NORM in only(model, "V6")

    def test_unknown(self, model):
        shard = Shard(model / SECOND)
        shard.entries.append(["x.weight", "BF16", [1], b"12"])
        shard.write()
        list_again(model)
        index_again(model)
        assert "x.weight" in only(model, "V6")

    def test_in_two_shards(self, model):
        norm = Shard(model / SECOND)[NORM]
        shard = Shard(model / OUTSIDE)
        shard.entries.append(norm)
        shard.write()
        change_json(
            model / INDEX, lambda value: value["metadata"].update(total_size=value["metadata"]["total_size"] + 512)
        )
        assert "two shards" in only(model, "V6")

    def test_in_the_wrong_file(self, model):
        first, second = Shard(model / FIRST), Shard(model / SECOND)
        first.entries.append(second.entries.pop(second.place(NORM)))
        first.write()
        second.write()
        list_again(model)
        index_again(model)
        assert f"{NORM}: " in only(model, "V6")

    @pytest.mark.parametrize("shape", [[2, 128], [1, 256], [256, 1]])
    def test_another_shape(self, model, shape):
        shard = Shard(model / SECOND)
        shard[NORM][2] = shape
        shard.write()
        assert f"{NORM}: {tuple(shape)}" in only(model, "V6")

    @pytest.mark.parametrize("size", [0, 1, None, "1"])
    def test_total_size(self, model, size):
        change_json(model / INDEX, lambda value: value["metadata"].update(total_size=size))
        assert "total_size" in only(model, "V6")

    def test_total_size_as_a_float(self, model):
        change_json(
            model / INDEX, lambda value: value["metadata"].update(total_size=float(value["metadata"]["total_size"]))
        )
        only(model, "V6")

    @pytest.mark.parametrize(("file", "prefix"), [(OUTSIDE, "model.visual.blocks.1."), (MTP, "mtp.layers.")])
    def test_half_a_part(self, model, file, prefix):
        shard = Shard(model / file)
        shard.entries = [entry for entry in shard.entries if not entry[0].startswith(prefix)]
        shard.write()
        list_again(model)
        assert prefix in only(model, "V6")

    @pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"metadata": {}}, {"weight_map": {"x": 5}}], ids=str)
    def test_an_index_without_content(self, model, content):
        (model / INDEX).write_text(json.dumps(content))
        only(model, "V6")

    @pytest.mark.parametrize(
        "content",
        [{"weight_map": []}, {"weight_map": None}, {"metadata": None}],
        ids=str,
    )
    def test_an_index_of_other_types(self, model, content):
        change_json(model / INDEX, lambda value: {**value, **content})
        only(model, "V6")

    def test_a_dtype_no_shard_may_hold(self, model):
        shard = Shard(model / SECOND)
        shard[NORM][1] = "I16"
        shard.write()
        seal(model)
        assert states(model)[0].keys() & {"V6", "V7"}

    def test_scales_in_the_wrong_file(self, model):
        second, outside = Shard(model / SECOND), Shard(model / OUTSIDE)
        outside.entries.append(second.entries.pop(second.place(f"{QUERY}_scale_inv")))
        second.write()
        outside.write()
        list_again(model)
        index_again(model)
        only(model, "V6", "V7")


class TestV7:
    @pytest.mark.parametrize(
        ("one", "other"), [(NORM, POST), (f"{EXPERT}_scale_inv", EXPERT.replace("up", "gate") + "_scale_inv")]
    )
    def test_two_tensors_in_each_others_place(self, model, one, other):
        shard = Shard(model / SECOND)
        i, j = shard.place(one), shard.place(other)
        shard.entries[i], shard.entries[j] = shard.entries[j], shard.entries[i]
        shard.write()
        index_again(model)
        assert SECOND in only(model, "V7", *(["V14", "V15"] if "scale" in one else []))

    def test_down_before_up(self, model):
        shard = Shard(model / SECOND)
        up, down = shard.place(EXPERT), shard.place(EXPERT.replace("up", "down"))
        shard.entries[up], shard.entries[down] = shard.entries[down], shard.entries[up]
        shard.write()
        index_again(model)
        assert EXPERT in only(model, "V7")

    def test_two_experts_in_each_others_place(self, model):
        shard = Shard(model / FIRST)
        shard.entries[0:3], shard.entries[3:6] = shard.entries[3:6], shard.entries[0:3]
        shard.write()
        index_again(model)
        only(model, "V7")

    def test_two_bytes_before_one(self, model):
        shard = Shard(model / OUTSIDE)
        shard.entries.reverse()
        shard.write()
        only(model, "V7")


class TestV8:
    def test_a_span_beside_a_page(self, model):
        """Only with V5: where the data starts on a page and V7 holds, every span of whole blocks does too."""
        Shard(model / FIRST).write(8)
        index_again(model)
        content = (model / FIRST).read_bytes()
        assert (8 + int.from_bytes(content[:8], "little")) % 4096
        assert "experts.0.gate_proj" in only(model, "V8", "V5")

    def test_a_span_behind_a_norm(self, model):
        shard = Shard(model / SECOND)
        shard.entries.insert(0, shard.entries.pop(shard.place(NORM)))
        shard.write()
        index_again(model)
        assert "experts.0.gate_proj" in only(model, "V8", "V7")


class TestV9:
    SCALE = f"{QUERY}_scale_inv"

    def test_codes_without_scales(self, model):
        shard = Shard(model / SECOND)
        del shard.entries[shard.place(self.SCALE)]
        shard.write()
        list_again(model)
        index_again(model)
        assert f"{QUERY}: F8_E4M3 without scales" in only(model, "V9", "V13", "V16")

    @pytest.mark.parametrize("shape", [[8], [2, 4], [8, 1], [4, 2, 1]])
    def test_another_grid(self, model, shape):
        shard = Shard(model / SECOND)
        shard[self.SCALE][2] = shape
        shard.write()
        assert self.SCALE in only(model, "V9", "V16")

    def test_too_few_scales(self, model):
        shard = Shard(model / SECOND)
        shard[self.SCALE][2:] = [2, 2], shard[self.SCALE][3][:8]
        shard.write()
        list_again(model)
        index_again(model)
        assert self.SCALE in only(model, "V9", "V16")

    def test_two_dtypes_in_a_shard(self, model):
        shard = Shard(model / SECOND)
        entry = shard.entries.pop(shard.place(self.SCALE))
        wide = np.frombuffer(entry[3], ml_dtypes.bfloat16).astype(np.float32).tobytes()
        after_codes = next(i for i, other in enumerate(shard.entries) if other[1] != "F8_E4M3")
        shard.entries.insert(after_codes, [self.SCALE, "F32", entry[2], wide])
        shard.write()
        list_again(model)
        index_again(model)
        assert SECOND in only(model, "V9", "V16")

    def test_f16(self, model):
        shard = Shard(model / MTP)
        for entry in shard.entries:
            if entry[0].endswith("_scale_inv"):
                entry[1] = "F16"
                entry[3] = np.full(len(entry[3]) // 2, 0.5, np.float16).tobytes()
        shard.write()
        assert MTP in only(model, "V9", "V16")

    def test_scales_of_a_weight_that_is_not_e4m3(self, model):
        name = f"{TEXT}layers.1.mlp.gate.weight"
        shard = Shard(model / SECOND)
        shard.entries.insert(shard.place(name) + 1, [f"{name}_scale_inv", "BF16", [1, 2], b"\x80\x3f" * 2])
        shard.write()
        list_again(model)
        index_again(model)
        assert name in only(model, "V9", "V13", "V16")

    def test_a_ragged_matrix(self, tmp_path):
        """A kept [192, 256] matrix, called E4M3 and given scales."""
        from support.tiny import Tiny, write_checkpoint

        write_checkpoint(Tiny(layers=2, interval=2, experts=4, top_k=2, shared_inter=192), tmp_path / "source")
        model = tmp_path / "model"
        with Checkpoint(tmp_path / "source") as source:
            convert(make_plan(source, load_recipe("e4m3")), model, workers=1, overwrite=False, quiet=True)
        assert states(model) == ({}, set())
        shard = Shard(model / SECOND)
        codes = next(i for i, entry in enumerate(shard.entries) if ".experts." not in entry[0])
        for kind in ("gate", "up", "down"):
            name = f"{TEXT}layers.1.mlp.shared_expert.{kind}_proj.weight"
            rows, columns = shape = shard[name][2]
            place = shard.place(name)
            grid = [-(-rows // 128), -(-columns // 128)]
            shard.entries[place] = [f"{name}_scale_inv", "BF16", grid, b"\x80\x3f" * (grid[0] * grid[1])]
            shard.entries.insert(codes, [name, "F8_E4M3", shape, bytes(rows * columns)])
            codes += 1
        shard.write()
        list_again(model)
        index_again(model)
        assert "E4M3 of shape (192, 256)" in only(model, "V9", "V13", "V16")


class TestV10:
    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    @pytest.mark.parametrize("name", [QUERY, EXPERT])
    def test_a_nan_code(self, model, name, code):
        set_bytes(model, SECOND, name, 12345, bytes([code]))
        index_again(model)
        assert f"{name}: 1 NaN codes" in only(model, "V10")

    @pytest.mark.parametrize("code", [0x7E, 0xFE, 0x00, 0x80])
    def test_every_other_code_may_stand(self, model, code):
        set_bytes(model, SECOND, QUERY, 12345, bytes([code]))
        seal(model)
        failures, unchecked = states(model)
        assert failures.keys() <= {"V17"}  # the report counted the code that stood there
        assert not unchecked


class TestV11:
    @pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf"), float("-inf"), -1.0], ids=str)
    @pytest.mark.parametrize("name", [QUERY, EXPERT])
    def test_a_scale(self, model, name, value):
        set_bytes(model, SECOND, f"{name}_scale_inv", 2, np.array(value, ml_dtypes.bfloat16).tobytes())
        index_again(model)
        assert f"{name}_scale_inv" in only(model, "V11")


class TestV12:
    def dequantised(self, model, file, *names):
        """Weights stored as BF16 instead, in their right places."""
        shard = Shard(model / file)
        for name in names:
            weight = shard.entries.pop(shard.place(name))
            scale = shard.place(f"{name}_scale_inv")
            shard.entries[scale] = [name, "BF16", weight[2], bytes(2 * len(weight[3]))]
        shard.write()
        list_again(model)

    @pytest.mark.parametrize(
        ("file", "name"),
        [
            (SECOND, KEY),
            (FIRST, f"{TEXT}layers.0.linear_attn.in_proj_z.weight"),
            (FIRST, f"{TEXT}layers.0.mlp.shared_expert.up_proj.weight"),
            (MTP, "mtp.layers.0.self_attn.q_proj.weight"),
        ],
    )
    def test_one_of_a_merged_group(self, model, file, name):
        self.dequantised(model, file, name)
        index_again(model)
        assert "BF16" in only(model, "V12", "V13", "V16")

    def test_one_expert_of_a_layer(self, model):
        kinds = [f"mtp.layers.0.mlp.experts.1.{kind}_proj.weight" for kind in ("gate", "up", "down")]
        shard = Shard(model / MTP)
        for name in kinds:  # still an expert span, so before the other codes
            shard[name][1], shard[name][3] = "BF16", bytes(2 * len(shard[name][3]))
            del shard.entries[shard.place(f"{name}_scale_inv")]
        shard.write()
        list_again(model)
        assert "experts" in only(model, "V12", "V13", "V16")


class TestV13:
    @pytest.mark.parametrize(
        "change",
        [
            lambda q: q.update(quant_method="gptq"),
            lambda q: q.update(fmt="e5m2"),
            lambda q: q.update(activation_scheme="static"),
            lambda q: q.update(weight_block_size=[64, 64]),
            lambda q: q.pop("weight_block_size") and None,
            lambda q: q.update(scale_fmt="ue8m0"),
            lambda q: q["modules_to_not_convert"].remove("lm_head"),
            lambda q: q["modules_to_not_convert"].append(f"{TEXT}layers.0.mlp.experts.3"),
            lambda q: q["modules_to_not_convert"].append(f"{TEXT}layers.0.self_attn.q_proj"),
            lambda q: q["modules_to_not_convert"].clear(),
            lambda q: q.update(modules_to_not_convert=None),
        ],
    )
    def test_a_changed_entry(self, model, change):
        change_json(model / "config.json", lambda value: change(value["quantization_config"]))
        only(model, "V13")

    @pytest.mark.parametrize("value", [None, [], {}, "fp8"], ids=str)
    def test_none_at_all(self, model, value):
        change_json(model / "config.json", lambda config: config.update(quantization_config=value))
        only(model, "V13")

    def test_absent(self, model):
        change_json(model / "config.json", lambda config: config.pop("quantization_config") and None)
        only(model, "V13")

    def test_present_although_nothing_is_quantised(self, originals, tmp_path):
        (tmp_path / "keep.yaml").write_text("rules: [{treatment: keep}]")
        model = tmp_path / "model"
        quantization = json.loads((originals / "out" / "config.json").read_text())["quantization_config"]
        with Checkpoint(originals / "bf16") as source:
            plan = make_plan(source, load_recipe(str(tmp_path / "keep.yaml")))
            convert(plan, model, workers=1, overwrite=False, quiet=True)
        assert states(model) == ({}, set())
        change_json(model / "config.json", lambda config: config.update(quantization_config=quantization))
        only(model, "V13")


def change_rows(model, change):
    rows = np.load(model / "experts.npy")
    replaced = change(rows)
    np.save(model / "experts.npy", rows if replaced is None else replaced)


def set_field(field, value):
    def change(rows):
        rows[field][3] = value

    return change


class TestV14:
    @pytest.mark.parametrize(
        "change",
        [
            lambda rows: rows[:-1],
            lambda rows: rows[1:],
            lambda rows: rows[:0],
            lambda rows: np.concatenate([rows, rows[-1:]]),
            lambda rows: rows[::-1],
            lambda rows: rows[[1, 0, *range(2, len(rows))]],
            set_field("layer", 1),
            set_field("expert", 2),
            set_field("code_dtype", b"BF16"),
            set_field("scale_dtype", b"F32"),
            set_field("scale_dtype", b"NONE"),
        ],
    )
    def test_rows(self, model, change):
        change_rows(model, change)
        only(model, "V14")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("shard", SECOND.encode()),
            ("offset", 8192),
            ("offset", 2**40),
            ("scale_offset", 0),
            ("gate_nbytes", 0),
            ("up_nbytes", 1),
            ("down_nbytes", 40000),
            ("scale_nbytes", 0),
        ],
    )
    def test_places(self, model, field, value):
        """These move what the CRC is taken of, too."""
        change_rows(model, set_field(field, value))
        assert "layer 0 expert 3" in only(model, "V14", "V15")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("shard", b"absent.safetensors"),
            ("shard", b""),
            ("shard", b"\xff\xfe"),
            ("offset", 2**63),
            ("gate_nbytes", 2**62),
            ("scale_offset", 2**64 - 1),
            ("scale_nbytes", 2**62),
        ],
    )
    def test_impossible_places(self, model, field, value):
        change_rows(model, set_field(field, value))
        assert "layer 0 expert 3" in only(model, "V14", "V15")

    @pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY"])
    def test_no_index(self, model, content):
        (model / "experts.npy").write_bytes(content)
        only(model, "V14", "V15")


class TestV15:
    def test_another_crc(self, model):
        change_rows(model, set_field("crc32c", 0))
        assert "layer 0 expert 3" in only(model, "V15")

    @pytest.mark.parametrize("kind", ["gate", "up", "down"])
    def test_another_byte(self, model, kind):
        set_bytes(model, SECOND, EXPERT.replace("up", kind), 777, b"\x11")
        assert "layer 1 expert 2" in only(model, "V15")

    @pytest.mark.parametrize("kind", ["gate", "up", "down"])
    def test_another_scale(self, model, kind):
        set_bytes(model, SECOND, EXPERT.replace("up", kind) + "_scale_inv", 2, b"\x81\x3f")
        assert "layer 1 expert 2" in only(model, "V15")


class TestV16:
    @pytest.mark.parametrize(
        "change",
        [
            lambda report: report.update(version=1),
            lambda report: report.pop("version") and None,
            lambda report: report["tensors"].pop() and None,
            lambda report: report["tensors"].append(report["tensors"][0]),
            lambda report: report["tensors"][5].update(name="x"),
            lambda report: report["tensors"].clear(),
            lambda report: report.pop("tensors") and None,
        ],
    )
    def test_entries(self, model, change):
        change_json(model / "report.json", change)
        only(model, "V16")

    @pytest.mark.parametrize("content", ["", "[]", "{}"])
    def test_no_report(self, model, content):
        (model / "report.json").write_text(content)
        only(model, "V16")

    @pytest.mark.parametrize(
        "change",
        [
            lambda report: report.update(tensors=None),
            lambda report: report.update(tensors=[None]),
            lambda report: report["tensors"][5].pop("name") and None,
            lambda report: report["tensors"][5].update(name=5),
        ],
    )
    def test_other_types(self, model, change):
        change_json(model / "report.json", change)
        only(model, "V16")

    KEYS = ("role", "part", "layer", "expert", "shape", "dtype", "nbytes", "treatment", "relative_l2", "scale_min")

    @pytest.mark.parametrize("key", KEYS)
    def test_what_an_entry_says(self, model, key):
        """docs/FORMAT.md section 6 lists what an entry has; all of it but the error is known from the headers."""

        def change(report):
            entry = next(entry for entry in report["tensors"] if entry["name"] == EXPERT)
            del entry[key]

        change_json(model / "report.json", change)
        only(model, "V16")

    def test_an_entry_that_contradicts_the_headers(self, model):
        def change(report):
            next(entry for entry in report["tensors"] if entry["name"] == EXPERT).update(dtype="BF16", nbytes=1)

        change_json(model / "report.json", change)
        only(model, "V16")


class TestV17:
    @pytest.mark.parametrize(
        "change",
        [
            lambda report: report.pop("histograms") and None,
            lambda report: report.update(histograms=None),
            lambda report: report["histograms"].pop() and None,
            lambda report: report["histograms"].reverse(),
            lambda report: report["histograms"][0].update(layer=1),
            lambda report: report["histograms"][0]["codes"].reverse(),
            lambda report: report["histograms"][0]["codes"].pop(3) and None,
            lambda report: report["histograms"][0]["scales"].update({"3": 1}),
        ],
    )
    def test_histograms(self, model, change):
        change_json(model / "report.json", change)
        assert "histograms" in only(model, "V17")

    @pytest.mark.parametrize("key", ["scale_min", "scale_max", "subnormal_share"])
    def test_what_an_entry_says_of_the_bytes(self, model, key):
        def change(report):
            next(entry for entry in report["tensors"] if entry["name"] == EXPERT)[key] *= 1.0001

        change_json(model / "report.json", change)
        assert EXPERT in only(model, "V17", "V16")  # the summary adds them up

    def test_a_changed_code_and_a_changed_scale(self, model):
        set_bytes(model, SECOND, EXPERT, 5, b"\x03")
        assert "V17" in states(model)[0]

    def test_histograms_are_those_of_the_bytes(self, model):
        """Counted here without Mosaic's counters."""
        rows = {
            (row["role"], row["layer"], row["part"]): row
            for row in json.loads((model / "report.json").read_text())["histograms"]
        }
        names = {entry[0]: entry for file in (FIRST, SECOND, MTP) for entry in Shard(model / file).entries}
        expert = [name for name in names if ".layers.1.mlp.experts." in name and "mtp" not in name]
        codes = np.concatenate(
            [np.frombuffer(names[name][3], np.uint8) & 0x7F for name in expert if "scale" not in name]
        )
        row = rows["routed_experts", 1, "decoder"]
        assert row["codes"] == np.bincount(codes, minlength=128).tolist()
        scales = np.concatenate(
            [np.frombuffer(names[name][3], ml_dtypes.bfloat16) for name in expert if "scale" in name]
        )
        exponents, counts = np.unique(np.floor(np.log2(scales.astype(float))).astype(int), return_counts=True)
        assert row["scales"] == {str(e): c for e, c in zip(exponents.tolist(), counts.tolist(), strict=True)}


# ------------------------------------------------------------------------------------------------------------ program


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
