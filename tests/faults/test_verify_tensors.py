"""See test_verify. V6 to V12: tensors, their order, codes and scales."""

import json

import ml_dtypes
import numpy as np
import pytest

from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.format.source import Checkpoint
from support.damage import (
    EXPERT,
    FIRST,
    INDEX,
    KEY,
    MTP,
    NORM,
    OUTSIDE,
    POST,
    QUERY,
    SECOND,
    TEXT,
    Shard,
    change_json,
    index_again,
    list_again,
    only,
    seal,
    set_bytes,
    states,
)


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
