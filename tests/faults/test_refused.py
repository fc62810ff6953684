"""Checkpoints refused from their headers: before anything is written, naming file, tensor, found, expected, remedy."""

import json
import os

import pytest
import torch

from support.faults import (
    EMBEDDING,
    EXPERT,
    FUSED,
    HEAD,
    MTP,
    NORM,
    QUERY,
    TEXT,
    VISION,
    converts,
    edit,
    edit_config,
    edit_index,
    file_of,
    refused,
    refused_while_reading,
    set_element,
)
from support.fp8 import unfuse
from support.shards import INDEX


class TestTensorsRefused:
    def test_unknown_model_type(self, bf16):
        edit_config(bf16, lambda config: config.update(model_type="mixtral"))
        error = refused(bf16, "mixtral", "qwen3_5_moe", str(bf16 / "config.json"))
        assert "expected" in error.facts

    @pytest.mark.parametrize(
        "name",
        [
            f"{TEXT}layers.0.self_attn.rotary_emb.inv_freq",
            f"{TEXT}layers.2.input_layernorm.weight",
            f"{TEXT}layers.0.linear_attn.in_proj_qkv.bias",
            f"{TEXT}layers.0.mlp.experts.4.gate_proj.weight",
            "model.visual.blocks.2.norm1.weight",
            "mtp.layers.1.input_layernorm.weight",
            "score.weight",
            f"{QUERY}_scale_inv",  # of a BF16 weight
        ],
    )
    def test_unknown_tensor(self, bf16, name):
        edit(bf16, lambda tensors: tensors.update({name: torch.ones(2, 2, dtype=torch.bfloat16)}))
        error = refused(bf16, name, str(file_of(bf16, name)))
        assert {"tensor", "expected"} <= error.facts.keys()

    @pytest.mark.parametrize("name", [NORM, QUERY, FUSED, EMBEDDING, HEAD, VISION, MTP, "mtp.fc.weight"])
    def test_missing_tensor(self, bf16, name):
        edit(bf16, lambda tensors: tensors.pop(name))
        error = refused(bf16, name, str(bf16))
        assert "lacks" in error.problem

    def test_missing_expert(self, bf16):
        edit(bf16, lambda tensors: {k: v for k, v in unfuse(tensors).items() if k != EXPERT})
        assert EXPERT in refused(bf16).facts["tensor"]

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            (NORM, (255,)),
            (NORM, (1, 256)),
            (QUERY, (256, 512)),
            (QUERY, (512, 256, 1)),
            (FUSED, (3, 256, 256)),
            (FUSED, (4, 256, 128)),
            (EMBEDDING, (511, 256)),
            (VISION, (64, 192)),
            (MTP, (0, 256)),
            (f"{TEXT}layers.0.linear_attn.conv1d.weight", (512, 4)),
        ],
    )
    def test_mis_shaped_tensor(self, bf16, name, shape):
        edit(bf16, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)}))
        error = refused(bf16, name, str(file_of(bf16, name)), str(list(shape)))
        assert error.facts["expected"].startswith("[")

    @pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.uint8, torch.bool, torch.float8_e5m2])
    @pytest.mark.parametrize("name", [NORM, QUERY, VISION])
    def test_wrong_dtype(self, bf16, name, dtype):
        edit(bf16, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
        error = refused(bf16, name, str(file_of(bf16, name)))
        assert "dtype" in error.problem

    def test_the_same_experts_fused_and_one_by_one(self, bf16):
        edit(bf16, lambda tensors: {**tensors, **unfuse(tensors)})
        error = refused(bf16, FUSED, "experts.0.gate_proj.weight")
        assert "twice" in error.problem

    def test_one_expert_beside_the_fused_ones(self, bf16):
        edit(bf16, lambda tensors: {**tensors, EXPERT: unfuse(tensors)[EXPERT]})
        assert "twice" in refused(bf16, FUSED, EXPERT).problem

    def test_a_head_although_tied(self, bf16):
        """Refused, not converted: what it means is not clear."""
        edit_config(bf16, lambda config: config["text_config"].update(tie_word_embeddings=True))
        assert "no rule covers" in refused(bf16, HEAD).problem

    def test_a_vision_tower_without_its_config(self, bf16):
        edit_config(bf16, lambda config: config.pop("vision_config"))
        refused(bf16, "vision_config")


class TestFilesRefused:
    @pytest.mark.parametrize("name", [NORM, EMBEDDING])
    @pytest.mark.parametrize("change", [-1, -100_000, +1, +4096])
    def test_truncated_and_overlong_shards(self, bf16, name, change):
        file = file_of(bf16, name)
        size = file.stat().st_size
        os.truncate(file, size + change)
        error = refused(bf16, str(file), str(size), str(size + change))
        assert "download" in error.facts["remedy"]

    def test_an_empty_shard(self, bf16):
        file = file_of(bf16, NORM)
        file.write_bytes(b"")
        refused(bf16, str(file))

    def test_a_shard_that_is_a_pointer_of_git_lfs(self, bf16):
        file = file_of(bf16, NORM)
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
        refused(bf16, str(file))

    def test_absent_files_are_all_listed(self, bf16):
        files = sorted(bf16.glob("*.safetensors"))
        for file in files[1:]:
            file.unlink()
        error = refused(bf16, *(file.name for file in files[1:]), str(bf16 / INDEX), "1 of 3")
        assert files[0].name not in error.facts["found"]

    def test_a_broken_link(self, bf16):
        file = file_of(bf16, NORM)
        file.unlink()
        file.symlink_to("../blobs/absent")
        refused(bf16, file.name)

    def test_the_index_lists_what_its_file_does_not_hold(self, bf16):
        other = next(file for file in sorted(bf16.glob("*.safetensors")) if file != file_of(bf16, NORM))
        edit_index(bf16, lambda weight_map: weight_map.update({NORM: other.name}))
        error = refused(bf16, NORM, str(other))
        assert "expected" in error.facts

    @pytest.mark.parametrize(
        "content", ["", "{", "<html>", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 5}']
    )
    def test_no_index(self, bf16, content):
        (bf16 / INDEX).write_text(content)
        refused(bf16, str(bf16 / INDEX))

    def test_an_index_that_is_not_utf8(self, bf16):
        (bf16 / INDEX).write_bytes(b"\xff\xfe\x00")
        refused(bf16, str(bf16 / INDEX))

    @pytest.mark.parametrize("file", ["../bf16/x", "/etc/passwd", "sub/x", "", ".", "..", None, 5, ["x"]])
    def test_the_index_names_no_file_of_this_directory(self, bf16, file):
        edit_index(bf16, lambda weight_map: (weight_map.clear(), weight_map.update({NORM: file})))
        error = refused(bf16, str(bf16 / INDEX), repr(file))
        assert "expected" in error.facts

    def test_the_one_bad_name_of_an_index_is_shown(self, bf16):
        edit_index(bf16, lambda weight_map: weight_map.update({NORM: "../elsewhere.safetensors"}))
        refused(bf16, "../elsewhere.safetensors")

    def test_the_index_names_an_impossible_file(self, bf16):
        edit_index(bf16, lambda weight_map: weight_map.update({NORM: "x" * 300}))
        refused(bf16, "x" * 300)

    def test_a_name_with_a_zero(self, bf16):
        edit_index(bf16, lambda weight_map: weight_map.update({NORM: "a\0b"}))
        refused(bf16, str(bf16 / INDEX))

    def test_the_index_lists_a_tensor_twice(self, bf16):
        text = (bf16 / INDEX).read_text()
        twice = f'"weight_map": {{"{NORM}": "model-00003-of-00003.safetensors",'
        (bf16 / INDEX).write_text(text.replace('"weight_map": {', twice, 1))
        refused(bf16, NORM)

    def test_no_weights(self, bf16):
        for file in bf16.glob("*.safetensors*"):
            file.unlink()
        refused(bf16, "model.safetensors")

    @pytest.mark.parametrize("content", [None, "", "{", "[]", "\ufeff{}", "[" * 100_000])
    def test_no_config(self, bf16, content):
        (bf16 / "config.json").unlink()
        if content is not None:
            (bf16 / "config.json").write_text(content)
        refused(bf16, str(bf16), "config.json")

    def test_a_lone_surrogate_in_the_config(self, bf16):
        """Legal JSON, if odd: it goes along, escaped."""
        edit_config(bf16, lambda config: config.update(note="\ud800"))
        converts(bf16)
        assert json.loads((bf16.parent / "out" / "config.json").read_text())["note"] == "\ud800"

    @pytest.mark.parametrize("kind", ["absent", "file"])
    def test_no_directory(self, tmp_path, kind):
        folder = tmp_path / "checkpoint"
        if kind == "file":
            folder.write_text("")
        error = refused(folder, str(folder))
        assert "expected" in error.facts


class TestFp8Refused:
    def test_without_a_scale(self, fp8):
        edit(fp8, lambda tensors: tensors.pop(f"{EXPERT}_scale_inv"))
        assert "scales" in refused(fp8, EXPERT, f"no {EXPERT}_scale_inv", str(file_of(fp8, EXPERT))).problem

    def test_scale_under_another_name(self, fp8):
        edit(fp8, lambda tensors: tensors.update({f"{QUERY[:-7]}.weight_scale": tensors.pop(f"{QUERY}_scale_inv")}))
        refused(fp8, QUERY, f"no {QUERY}_scale_inv")

    @pytest.mark.parametrize("shape", [(1, 1), (2, 4), (8,), (4, 2, 1), ()])
    def test_scale_of_another_shape(self, fp8, shape):
        scale = f"{QUERY}_scale_inv"
        edit(fp8, lambda tensors: tensors.update({scale: torch.ones(shape, dtype=torch.bfloat16)}))
        error = refused(fp8, scale, str(list(shape)), "[4, 2]", str(file_of(fp8, scale)))
        assert error.facts["tensor"] == scale

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu])
    def test_scale_of_another_dtype(self, fp8, dtype):
        scale = f"{QUERY}_scale_inv"
        edit(fp8, lambda tensors: tensors.update({scale: torch.ones(4, 2).to(dtype)}))
        refused(fp8, scale, str(file_of(fp8, scale)))

    @pytest.mark.parametrize(
        "change",
        [
            {"weight_block_size": [64, 64]},
            {"weight_block_size": None},
            {"weight_block_size": [128]},
            {"quant_method": "gptq"},
            {"quant_method": "compressed-tensors"},
            {"fmt": "e5m2"},
        ],
        ids=str,
    )
    def test_quantised_otherwise(self, fp8, change):
        edit_config(fp8, lambda config: config["quantization_config"].update(change))
        refused(fp8, *map(str, change.values()), "config.json")

    @pytest.mark.parametrize("value", [[], "fp8", {}, 5], ids=str)
    def test_a_quantization_config_that_is_none(self, fp8, value):
        edit_config(fp8, lambda config: config.update(quantization_config=value))
        refused(fp8, "config.json")

    def test_a_vector(self, fp8):
        edit(fp8, lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float8_e4m3fn)}))
        refused(fp8, NORM)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, -0.0], ids=str)
    def test_scales_that_mean_nothing(self, fp8, value):
        scale = f"{QUERY}_scale_inv"
        set_element(fp8, scale, (2, 1), value)
        error = refused_while_reading(fp8, scale, "(2, 1)", str(value), str(file_of(fp8, scale)))
        assert error.facts["tensor"] == scale
