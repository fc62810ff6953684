"""Faulty and odd checkpoints: refused before anything is written, naming the fault, or converted correctly.

What headers tell is refused at plan time: OUT must not even be created. What only the weights tell (NaN, senseless
scales) is refused when it is read: then OUT holds a resumable remainder, and never a catalog.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mosaic.convert import pipeline
from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.quantize import NonFinite
from mosaic.convert.recipe import load_recipe
from mosaic.convert.verify import verify
from mosaic.format.errors import InputError
from mosaic.format.shard import read_header
from mosaic.format.source import Checkpoint
from support.fp8 import dequantise, quantise, read_checkpoint, unfuse, write_official_fp8
from support.shards import INDEX, write_index, write_shards
from support.tiny import Tiny, write_checkpoint

MOSAIC_CONVERT = Path(sys.executable).with_name("mosaic-convert")
NOT_REFUSED = pytest.fail.Exception  # what pytest.raises raises when nothing was

TEXT = "model.language_model."
NORM = f"{TEXT}layers.0.input_layernorm.weight"
QUERY = f"{TEXT}layers.1.self_attn.q_proj.weight"
KEY = f"{TEXT}layers.1.self_attn.k_proj.weight"
FUSED = f"{TEXT}layers.0.mlp.experts.gate_up_proj"
EXPERT = f"{TEXT}layers.0.mlp.experts.2.up_proj.weight"
EMBEDDING = f"{TEXT}embed_tokens.weight"
HEAD = "lm_head.weight"
VISION = "model.visual.blocks.1.attn.qkv.weight"
MTP = "mtp.layers.0.self_attn.k_proj.weight"


# ----------------------------------------------------------------------------------------- changing a checkpoint


def edit(folder, change):
    """Rewrite the weights after `change` of {name: tensor}; each tensor stays in its file, new ones go to the last."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    last = sorted(set(weight_map.values()))[-1]
    tensors = read_checkpoint(folder)
    changed = change(tensors)
    files = {}
    for name, tensor in (changed if isinstance(changed, dict) else tensors).items():
        files.setdefault(weight_map.get(name, last), {})[name] = tensor.clone()
    for file in set(weight_map.values()):
        (folder / file).unlink()
    write_shards(folder, files)


def edit_config(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def edit_index(folder, change):
    file = folder / INDEX
    value = json.loads(file.read_text())
    change(value["weight_map"])
    file.write_text(json.dumps(value))


def file_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def set_element(folder, name, position, value):
    def change(tensors):
        tensors[name].view(torch.uint8 if tensors[name].dtype == torch.float8_e4m3fn else tensors[name].dtype)[
            position
        ] = value

    edit(folder, change)


# ---------------------------------------------------------------------------------------------- what must follow


def run(folder, out, recipe="e4m3", nonfinite=NonFinite.REFUSE, overwrite=False):
    """What mosaic-convert does, and the plan."""
    with Checkpoint(folder) as source:
        plan = make_plan(source, load_recipe(recipe), nonfinite)
        written = convert(plan, out, workers=1, overwrite=overwrite, quiet=True)
    return written, plan


def refused(folder, *facts, recipe="e4m3", out=None):
    """The refusal of a checkpoint: nothing written, everything named."""
    out = out or folder.parent / "out"
    with pytest.raises(InputError) as refusal:
        run(folder, out, recipe)
    assert not out.exists()
    names_everything(refusal.value, *facts)
    return refusal.value


def names_everything(error, *facts):
    assert {"file", "found", "expected", "remedy"} <= error.facts.keys()
    for fact in facts:
        assert fact in str(error)


def refused_while_reading(folder, *facts, recipe="e4m3"):
    """The refusal of weights: no catalog, and the directory is known as unfinished."""
    out = folder.parent / "out"
    with pytest.raises(InputError) as refusal:
        run(folder, out, recipe)
    assert not (out / "mosaic.json").exists()
    assert not list(out.glob(".mosaic-convert/*.partial"))
    names_everything(refusal.value, *facts)
    assert {"tensor", "expected"} <= refusal.value.facts.keys()
    with pytest.raises(InputError, match="unfinished"):
        verify(out)
    return refusal.value


def strict_json(file):
    """As browsers and other languages read it: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{file}: {constant} is no JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def converts(folder, recipe="e4m3", nonfinite=NonFinite.REFUSE):
    """{name: tensor} of the result, whose every invariant holds; and its report."""
    out = folder.parent / "out"
    written, _ = run(folder, out, recipe, nonfinite)
    assert written
    assert {result.invariant: result.failures for result in verify(out) if not result.holds} == {}
    for file in ("config.json", "mosaic.json", "report.json", INDEX):
        strict_json(out / file)
    return read_checkpoint(out), strict_json(out / "report.json")


def means_the_source(source, result):
    """Kept tensors are byte-identical; quantised ones within 16 scales, and no scale twice as large as it need be."""
    for name, tensor in unfuse(source).items():
        stored = result.pop(name)
        if stored.dtype != torch.float8_e4m3fn:
            assert stored.dtype == tensor.dtype, name
            assert torch.equal(stored.view(torch.uint8), tensor.view(torch.uint8)), name
            continue
        scale = result.pop(f"{name}_scale_inv").float()
        bound = 16 * dequantise(torch.ones_like(stored), scale)
        assert ((dequantise(stored, scale) - tensor.float()).abs() <= bound).all(), name
        expected = quantise(tensor.float(), torch.float32)[1]
        assert (scale >= expected * (1 - 2**-20)).all(), name
        assert (scale <= expected * (1 + 2**-6)).all(), name
    assert not result


def same_shards(out, reference):
    """The shards are those of the reference conversion, byte for byte."""
    names = sorted(file.name for file in reference.glob("*.safetensors"))
    assert names == sorted(file.name for file in out.glob("*.safetensors"))
    for name in names:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name


# ------------------------------------------------------------------------------------------- refused from headers


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


# ------------------------------------------------------------------------------------------- refused while reading


NONFINITE = [float("nan"), float("inf"), float("-inf")]


class TestNonFinite:
    @pytest.mark.parametrize("value", NONFINITE, ids=str)
    def test_in_a_weight_to_quantise(self, bf16, value):
        set_element(bf16, QUERY, (300, 17), value)
        error = refused_while_reading(bf16, QUERY, "[300, 17]", "block (2, 0)", str(value), file_of(bf16, QUERY).name)
        assert "--nonfinite zero" in error.facts["remedy"]

    @pytest.mark.parametrize(
        ("name", "position", "value"),
        [
            (NORM, (200,), float("nan")),
            (VISION, (3, 2), float("inf")),
            (EMBEDDING, (511, 255), float("-inf")),
        ],
    )
    def test_in_a_kept_tensor(self, bf16, name, position, value):
        set_element(bf16, name, position, value)
        refused_while_reading(bf16, name, str(list(position)), str(value), file_of(bf16, name).name)

    def test_in_a_fused_expert_names_the_place_in_the_source(self, bf16):
        """Row 200 of gate_up is row 72 of up: [2, 200, 5] of the source, or else [72, 5] of the output."""
        set_element(bf16, FUSED, (2, 200, 5), float("nan"))
        error = refused_while_reading(bf16, FUSED.removesuffix("gate_up_proj"))
        assert "[2, 200, 5]" in error.facts["found"] or EXPERT in error.facts["tensor"]

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    def test_a_nan_code(self, fp8, code):
        set_element(fp8, EXPERT, (100, 200), code)
        refused_while_reading(fp8, EXPERT, f"0x{code:02X}", "[100, 200]", "block (0, 1)", file_of(fp8, EXPERT).name)

    @pytest.mark.parametrize(
        ("name", "entry", "position", "row", "value"),
        [
            (QUERY, QUERY, (300, 17), (300, 17), float("nan")),
            (QUERY, QUERY, (300, 17), (300, 17), float("-inf")),
            (NORM, NORM, (200,), (200,), float("inf")),
            (FUSED, EXPERT, (2, 200, 5), (72, 5), float("nan")),
        ],
    )
    def test_zeroed_on_request(self, bf16, name, entry, position, row, value):
        set_element(bf16, name, position, value)
        result, report = converts(bf16, nonfinite=NonFinite.ZERO)
        counts = {e["name"]: e["nonfinite_zeroed"] for e in report["tensors"] if "nonfinite_zeroed" in e}
        assert counts == {entry: 1}
        assert result[entry].float()[row] == 0
        source = read_checkpoint(bf16)
        source[name][position] = 0.0
        means_the_source(source, result)

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    def test_nan_codes_zeroed_on_request(self, fp8, code):
        set_element(fp8, EXPERT, (100, 200), code)
        expected = read_checkpoint(fp8)
        expected[EXPERT].view(torch.uint8)[100, 200] = 0
        result, report = converts(fp8, nonfinite=NonFinite.ZERO)
        counts = {e["name"]: e["nonfinite_zeroed"] for e in report["tensors"] if "nonfinite_zeroed" in e}
        assert counts == {EXPERT: 1}
        assert_same_tensors(result, expected)

    def test_many_are_counted(self, bf16):
        def change(tensors):
            tensors[QUERY][:, ::2] = float("nan")

        edit(bf16, change)
        report = converts(bf16, nonfinite=NonFinite.ZERO)[1]
        entry = next(entry for entry in report["tensors"] if entry["name"] == QUERY)
        assert entry["nonfinite_zeroed"] == 512 * 128

    def test_the_policy_is_part_of_the_plan(self, bf16):
        with Checkpoint(bf16) as source:
            plans = [make_plan(source, load_recipe("e4m3"), policy) for policy in NonFinite]
        assert plans[0].digest != plans[1].digest


# ------------------------------------------------------------------------------------------------- odd, but sound


def assert_same_tensors(result, expected):
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype, name
        assert result[name].shape == tensor.shape, name
        assert torch.equal(result[name].view(torch.uint8), tensor.view(torch.uint8)), name


class TestOddButSound:
    def test_the_ordinary_one(self, bf16):
        result, _ = converts(bf16)
        means_the_source(read_checkpoint(bf16), result)

    @pytest.mark.parametrize(
        "tiny",
        [
            Tiny(layers=2, interval=2, experts=4, top_k=2, variant="3.5"),
            Tiny(layers=2, interval=2, experts=4, top_k=2, experts_layout="per_expert", mtp=False, visual=False),
            Tiny("qwen3_next", layers=2, interval=2, experts=4, top_k=2, mlp_only_layers=(0,)),
            Tiny("qwen3_moe", layers=2, experts=4, top_k=2),
            Tiny(layers=2, interval=2, experts=4, top_k=2, tie=True),
            Tiny(layers=2, interval=2, experts=4, top_k=2, dtype="float16"),
            Tiny(layers=2, interval=2, experts=4, top_k=2, dtype="float32"),
        ],
        ids=["3.5", "per_expert", "qwen3_next", "qwen3_moe", "tied", "float16", "float32"],
    )
    def test_every_kind(self, tmp_path, tiny):
        write_checkpoint(tiny, tmp_path / "source")
        result, _ = converts(tmp_path / "source")
        assert (HEAD in result) is not tiny.tie
        means_the_source(read_checkpoint(tmp_path / "source"), result)

    def test_one_file_without_an_index(self, bf16, originals):
        tensors = read_checkpoint(bf16)
        for file in bf16.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, bf16 / "model.safetensors")
        converts(bf16)
        same_shards(bf16.parent / "out", originals / "out")

    def test_one_file_beside_another(self, bf16):
        tensors = read_checkpoint(bf16)
        for file in bf16.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, bf16 / "model.safetensors")
        save_file({"x": torch.ones(1)}, bf16 / "consolidated.safetensors")
        assert Checkpoint(bf16).unlisted == ["consolidated.safetensors"]

    def test_a_stray_shard_is_ignored_and_named(self, bf16, originals):
        save_file({NORM: torch.zeros(256)}, bf16 / "model-00004-of-00004.safetensors")
        (bf16 / "broken.safetensors").write_bytes(b"not read at all")
        assert Checkpoint(bf16).unlisted == ["broken.safetensors", "model-00004-of-00004.safetensors"]
        report = converts(bf16)[1]
        assert report["unlisted_in_source"] == ["broken.safetensors", "model-00004-of-00004.safetensors"]
        same_shards(bf16.parent / "out", originals / "out")

    def test_a_tensor_of_a_listed_file_that_is_not_listed(self, bf16, originals):
        file = file_of(bf16, NORM)
        save_file({**load_file(file), "rotary.inv_freq": torch.ones(3)}, file)
        assert Checkpoint(bf16).unlisted == [f"rotary.inv_freq ({file.name})"]
        converts(bf16)
        same_shards(bf16.parent / "out", originals / "out")

    def test_two_files_hold_a_tensor_and_the_index_decides(self, bf16, originals):
        other = next(file for file in sorted(bf16.glob("*.safetensors")) if file != file_of(bf16, NORM))
        save_file({**load_file(other), NORM: torch.zeros(7)}, other)
        assert Checkpoint(bf16).unlisted == [f"{NORM} ({other.name})"]
        converts(bf16)
        same_shards(bf16.parent / "out", originals / "out")

    def test_links_as_in_a_download_cache(self, bf16, originals):
        blobs = bf16.parent / "blobs"
        blobs.mkdir()
        for number, file in enumerate(sorted(bf16.iterdir())):
            file.rename(blobs / f"{number:064x}")
            file.symlink_to(f"../blobs/{number:064x}")
        converts(bf16)
        same_shards(bf16.parent / "out", originals / "out")
        assert not [file for file in (bf16.parent / "out").iterdir() if file.is_symlink()]

    def test_a_read_only_checkpoint_is_left_as_it_is(self, bf16, originals):
        before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in bf16.iterdir()}
        for file in [*bf16.iterdir(), bf16]:
            file.chmod(0o555 if file.is_dir() else 0o444)
        stamp = bf16.stat().st_mtime_ns
        try:
            converts(bf16)
            assert bf16.stat().st_mtime_ns == stamp
            assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in bf16.iterdir()} == before
            same_shards(bf16.parent / "out", originals / "out")
            copied = bf16.parent / "out" / "generation_config.json"
            assert copied.read_bytes() == (bf16 / "generation_config.json").read_bytes()
        finally:
            bf16.chmod(0o755)

    def test_flat_names_under_a_nested_config(self, bf16, originals):
        edit(bf16, lambda tensors: {name.replace(TEXT, "model."): tensor for name, tensor in tensors.items()})
        converts(bf16)
        same_shards(bf16.parent / "out", originals / "out")

    def test_flat_and_nested_names_mixed(self, bf16):
        flat = NORM.replace(TEXT, "model.")
        edit(bf16, lambda tensors: tensors.update({flat: tensors.pop(NORM)}))
        refused(bf16, NORM)

    def test_experts_one_by_one_in_one_layer_only(self, bf16, originals):
        prefix = f"{TEXT}layers.0.mlp.experts."

        def change(tensors):
            single = {name: tensor for name, tensor in unfuse(tensors).items() if name.startswith(prefix)}
            return {name: t for name, t in tensors.items() if not name.startswith(prefix)} | single

        edit(bf16, change)
        converts(bf16)
        same_shards(bf16.parent / "out", originals / "out")

    @pytest.mark.parametrize("part", ["mtp.", "model.visual."])
    def test_without_an_optional_part(self, bf16, part):
        edit(bf16, lambda tensors: {name: t for name, t in tensors.items() if not name.startswith(part)})
        result, _ = converts(bf16)
        assert not [name for name in result if name.startswith(part)]
        assert (bf16.parent / "out" / "mtp.safetensors").exists() is (part != "mtp.")
        means_the_source(read_checkpoint(bf16), result)

    @pytest.mark.parametrize(
        "change", [{"hidden": 320}, {"moe_inter": 192}, {"hidden": 320, "moe_inter": 192}], ids=str
    )
    def test_ragged_sizes(self, tmp_path, change):
        tiny = Tiny(layers=2, interval=2, experts=4, top_k=2, **change)
        write_checkpoint(tiny, tmp_path / "source")
        result, report = converts(tmp_path / "source")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        skipped = config.get("quantization_config", {}).get("modules_to_not_convert", [])
        quantised = {name for name, tensor in result.items() if tensor.dtype == torch.float8_e4m3fn}
        whole = {name for name in quantised if all(size % 128 == 0 for size in result[name].shape)}
        assert quantised == whole
        if "hidden" in change:
            assert not quantised
            assert "quantization_config" not in config
        else:
            assert quantised
            assert [entry for entry in skipped if "experts" in entry] == [
                f"{TEXT}layers.0.mlp.experts",
                f"{TEXT}layers.1.mlp.experts",
                "mtp.layers.0.mlp.experts",
            ]
        notes = {entry["role"]: entry["note"] for entry in report["tensors"] if "note" in entry}
        assert notes["routed_experts"].startswith("kept: ")
        means_the_source(read_checkpoint(tmp_path / "source"), result)

    def test_float_sizes_that_do_not_fit_bfloat16(self, bf16):
        """F32 weights that need all their bits stay as they are where they are kept."""
        edit(bf16, lambda tensors: tensors.update({NORM: torch.full((256,), 1 / 3)}))
        result, _ = converts(bf16)
        assert result[NORM].dtype == torch.float32
        assert torch.equal(result[NORM], torch.full((256,), 1 / 3))

    @pytest.mark.parametrize("recipe", ["e4m3", "experts-only"])
    @pytest.mark.parametrize(
        ("name", "dtype"), [(KEY, torch.float32), (f"{TEXT}layers.0.linear_attn.in_proj_a.weight", torch.float32)]
    )
    def test_linears_that_engines_merge_in_two_dtypes(self, bf16, recipe, name, dtype):
        """Either refused, or V12 holds."""
        edit(bf16, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
        try:
            converts(bf16, recipe)
        except InputError as error:
            names_everything(error, name)

    def test_experts_of_a_layer_in_two_dtypes(self, bf16):
        edit(bf16, lambda tensors: unfuse({**tensors}))
        edit(bf16, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].float()}))
        converts(bf16)
        recipe = bf16.parent / "keep.yaml"
        recipe.write_text("rules: [{treatment: keep}]")
        error = refused(bf16, "BF16", "F32", recipe=str(recipe), out=bf16.parent / "kept")
        assert "experts of one layer" in error.problem

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @pytest.mark.parametrize("value", [1e38, 3.3895313892515355e38])
    def test_the_largest_bfloat16_weights(self, bf16, value):
        set_element(bf16, QUERY, (0, 0), value)
        result, _ = converts(bf16)
        means_the_source(read_checkpoint(bf16), result)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_the_largest_float32_weight(self, bf16):
        """Finite, so converted (within 16 scales) or refused by name."""

        def change(tensors):
            tensors[QUERY] = tensors[QUERY].float()
            tensors[QUERY][0, 0] = torch.finfo(torch.float32).max

        edit(bf16, change)
        try:
            converts(bf16)
        except InputError as error:
            names_everything(error, QUERY)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_a_weight_beyond_bfloat16(self, bf16):
        def change(tensors):
            tensors[NORM] = torch.full((256,), torch.finfo(torch.float32).max)

        edit(bf16, change)
        recipe = bf16.parent / "narrow.yaml"
        recipe.write_text("rules: [{treatment: bf16}]")
        try:
            assert torch.isfinite(converts(bf16, str(recipe))[0][NORM].float()).all()
        except InputError as error:
            names_everything(error, NORM)


class TestOddFp8:
    def test_passes_through(self, fp8):
        result, report = converts(fp8)
        assert_same_tensors(result, read_checkpoint(fp8))
        assert {e["treatment"] for e in report["tensors"] if e["dtype"] == "F8_E4M3"} == {"pass-through"}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_scales_that_are_not_bfloat16(self, bf16, tmp_path, dtype):
        write_official_fp8(bf16, tmp_path / "fp8", dtype)
        source = read_checkpoint(tmp_path / "fp8")
        result, _ = converts(tmp_path / "fp8")
        assert_same_tensors(result, {n: t.float() if n.endswith("_scale_inv") else t for n, t in source.items()})

    def test_one_wide_scale_widens_those_of_its_shard(self, fp8):
        edit(fp8, lambda tensors: tensors.update({f"{EXPERT}_scale_inv": tensors[f"{EXPERT}_scale_inv"].float()}))
        source = read_checkpoint(fp8)
        result, _ = converts(fp8)
        wide = {name for name, t in result.items() if name.endswith("_scale_inv") and t.dtype == torch.float32}
        assert wide == {n for n in source if n.endswith("_scale_inv") and n.startswith(f"{TEXT}layers.0.")}
        assert_same_tensors(result, {n: t.float() if n in wide else t for n, t in source.items()})

    def test_a_weight_that_is_bfloat16_among_wide_scales(self, bf16, tmp_path):
        """It is quantised, and its new scales are F32 like those beside it."""
        write_official_fp8(bf16, tmp_path / "fp8", torch.float32)
        plain = read_checkpoint(bf16)[QUERY]

        def change(tensors):
            tensors[QUERY] = plain
            del tensors[f"{QUERY}_scale_inv"]

        edit(tmp_path / "fp8", change)
        result, _ = converts(tmp_path / "fp8")
        assert result[f"{QUERY}_scale_inv"].dtype == torch.float32
        error = dequantise(result[QUERY], result[f"{QUERY}_scale_inv"]) - plain.float()
        assert error.abs().max() <= 16 * result[f"{QUERY}_scale_inv"].max()

    def test_fused_experts(self, bf16, originals):
        """gate_up_proj and its scales as stacks: cut where gate ends, at a whole block."""

        def change(tensors):
            for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
                pairs = [quantise(matrix) for matrix in tensors[name]]
                tensors[name], tensors[f"{name}_scale_inv"] = (torch.stack(group) for group in zip(*pairs, strict=True))

        edit(bf16, change)
        expected = read_checkpoint(originals / "fp8")
        result, _ = converts(bf16)
        experts = {name for name in result if ".experts." in name}
        assert experts == {name for name in expected if ".experts." in name}
        assert_same_tensors({n: result[n] for n in experts}, {n: expected[n] for n in experts})

    @pytest.mark.parametrize("change", [{"hidden": 320}, {"moe_inter": 192}], ids=str)
    def test_ragged(self, tmp_path, change):
        """Dequantised in float32 and rounded to BF16 once; the report says so."""
        write_checkpoint(Tiny(layers=2, interval=2, experts=4, top_k=2, **change), tmp_path / "bf16")
        write_official_fp8(tmp_path / "bf16", tmp_path / "fp8")
        source = read_checkpoint(tmp_path / "fp8")
        result, report = converts(tmp_path / "fp8")
        notes = {entry["name"]: entry["note"] for entry in report["tensors"] if "note" in entry}
        for name, tensor in source.items():
            if name.endswith("_scale_inv"):
                assert (name in result) is (result[name.removesuffix("_scale_inv")].dtype == torch.float8_e4m3fn)
            elif tensor.dtype != torch.float8_e4m3fn:
                assert torch.equal(result[name].view(torch.uint8), tensor.view(torch.uint8)), name
            elif result[name].dtype == torch.bfloat16:
                assert torch.equal(result[name], dequantise(tensor, source[f"{name}_scale_inv"]).bfloat16()), name
                assert notes[name].startswith("dequantised: ")
            else:
                assert all(size % 128 == 0 for size in tensor.shape)
                assert torch.equal(result[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert notes[EXPERT]

    @pytest.mark.parametrize("recipe", ["bf16", "f32"])
    def test_dequantised_on_request(self, fp8, recipe):
        file = fp8.parent / f"{recipe}.yaml"
        file.write_text(f"rules: [{{role: routed_experts, treatment: {recipe}}}, {{treatment: keep}}]")
        source = read_checkpoint(fp8)
        result, _ = converts(fp8, str(file))
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[recipe]
        assert torch.equal(result[EXPERT], dequantise(source[EXPERT], source[f"{EXPERT}_scale_inv"]).to(dtype))
        assert result[QUERY].dtype == torch.float8_e4m3fn

    def test_an_embedding_is_never_stored_as_e4m3(self, fp8):
        """docs/FORMAT.md section 6 and MODEL-SPEC 5.3.7: FP8 tensors of such roles would be misread."""

        def change(tensors):
            tensors[EMBEDDING], tensors[f"{EMBEDDING}_scale_inv"] = quantise(tensors[EMBEDDING])

        edit(fp8, change)
        try:
            result, _ = converts(fp8)
        except InputError as error:
            names_everything(error, EMBEDDING)
        else:
            assert result[EMBEDDING].dtype == torch.bfloat16

    def test_half_of_a_merged_group(self, fp8, originals):
        plain = read_checkpoint(originals / "bf16")[KEY]

        def change(tensors):
            tensors[KEY] = plain
            del tensors[f"{KEY}_scale_inv"]

        edit(fp8, change)
        try:
            converts(fp8, "experts-only")
        except InputError as error:
            names_everything(error, KEY)


# ------------------------------------------------------------------------------------------------------------ OUT


def snapshot(folder):
    return {
        file.relative_to(folder): (file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(folder.rglob("*"))
    }


class TestOut:
    def refused(self, source, out, *facts, **options):
        with pytest.raises(InputError) as refusal:
            run(source, out, **options)
        for fact in (str(out), "remedy", *facts):
            assert fact in str(refusal.value)
        return refusal.value

    @pytest.mark.parametrize("place", [".", "sub", "a/b", "../bf16", "../bf16/../bf16/x"])
    def test_inside_the_checkpoint(self, bf16, place):
        before = snapshot(bf16)
        self.refused(bf16, bf16 / place, "lies in the checkpoint")
        assert snapshot(bf16) == before

    def test_inside_the_checkpoint_through_a_link(self, bf16):
        link = bf16.parent / "link"
        link.symlink_to(bf16)
        before = snapshot(bf16)
        for out in (link, link / "sub"):
            self.refused(bf16, out, "lies in the checkpoint")
        self.refused(link, bf16, "lies in the checkpoint")
        assert snapshot(bf16) == before

    def test_a_file(self, bf16):
        out = bf16.parent / "out"
        out.write_text("precious")
        self.refused(bf16, out, "is a file")
        assert out.read_text() == "precious"

    def test_below_a_file(self, bf16):
        (bf16.parent / "file").write_text("precious")
        self.refused(bf16, bf16.parent / "file" / "out")

    def test_a_broken_link(self, bf16):
        out = bf16.parent / "out"
        out.symlink_to(bf16.parent / "unmounted")
        self.refused(bf16, out)

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("content", ["notes.txt", ".hidden", "config.json", "layers-00.safetensors"])
    def test_a_foreign_directory(self, bf16, content, overwrite):
        out = bf16.parent / "out"
        out.mkdir()
        (out / content).write_text("precious")
        self.refused(bf16, out, "holds something else", content, overwrite=overwrite)
        assert (out / content).read_text() == "precious"
        assert len(list(out.iterdir())) == 1

    def test_the_parent_of_the_checkpoint(self, bf16):
        self.refused(bf16, bf16.parent, "holds something else", overwrite=True)

    def test_an_empty_directory_and_one_that_is_not_there(self, bf16, originals):
        empty = bf16.parent / "empty"
        empty.mkdir()
        for out in (empty, bf16.parent / "a" / "b"):
            assert run(bf16, out)[0]
            same_shards(out, originals / "out")

    def test_complete_already(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        before = snapshot(out)
        stamp = out.stat().st_mtime_ns
        assert run(bf16, out)[0] is False
        assert snapshot(out) == before
        assert out.stat().st_mtime_ns == stamp

    def test_overwriting_a_complete_one_writes_the_same_again(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        shard = next(out.glob("layers-*"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1  # of the right size: only verify would see it
        shard.write_bytes(data)
        assert run(bf16, out, overwrite=True)[0]
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before

    @pytest.mark.parametrize("damage", ["shard absent", "shard cut", "catalog cut", "report absent", "other version"])
    def test_a_damaged_one_is_refused_and_the_remedy_repairs_it(self, bf16, damage):
        out = bf16.parent / "out"
        run(bf16, out)
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        if damage == "shard absent":
            next(out.glob("layers-*")).unlink()
        elif damage == "shard cut":
            os.truncate(next(out.glob("layers-*")), 5000)
        elif damage == "catalog cut":
            os.truncate(out / "mosaic.json", 100)
        elif damage == "report absent":
            (out / "report.json").unlink()
        else:
            (out / "mosaic.json").write_text('{"format_version": 2}')
        assert "damaged" in self.refused(bf16, out, "--overwrite").problem
        assert run(bf16, out, overwrite=True)[0]
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before

    def test_another_source_with_equal_headers_is_another_source(self, bf16, tmp_path):
        """A fine-tune: same config, names, shapes, sizes. Never half of one and half of the other."""
        other = tmp_path / "tuned"
        shutil.copytree(bf16, other)
        edit(other, lambda tensors: tensors.update({name: t * 1.25 for name, t in tensors.items()}))
        for mine, yours in zip(sorted(other.glob("*.safetensors")), sorted(bf16.glob("*.safetensors")), strict=True):
            spans = [{name: info.span for name, info in read_header(file).items()} for file in (mine, yours)]
            assert spans[0] == spans[1]
        out = bf16.parent / "out"
        run(bf16, out)
        self.refused(other, out, "--overwrite")
        (out / "mosaic.json").unlink()  # as if stopped just before the end, with all its records
        (out / ".mosaic-convert").mkdir()
        with Checkpoint(bf16) as checkpoint:
            digest = make_plan(checkpoint, load_recipe("e4m3")).digest
        for shard in out.glob("*.safetensors"):
            record = {"version": 1, "plan": digest, "nbytes": shard.stat().st_size, "sha256": "", "tensors": []}
            (out / ".mosaic-convert" / f"{shard.name}.json").write_text(json.dumps(record))
        self.refused(other, out, "--overwrite")
        assert run(other, out, overwrite=True)[0]
        run(other, bf16.parent / "fresh")
        same_shards(out, bf16.parent / "fresh")

    def test_files_of_an_earlier_source_do_not_stay(self, bf16):
        out = bf16.parent / "out"
        (bf16 / "tokenizer.json").write_text("{}")
        run(bf16, out)
        (out / "mosaic.json").write_text("{")  # nothing to tell what is ours
        (bf16 / "tokenizer.json").unlink()
        assert run(bf16, out, overwrite=True)[0]
        assert not (out / "tokenizer.json").exists()
        assert all(result.holds for result in verify(out))

    def test_a_write_error_is_a_refusal_and_the_same_command_resumes(self, bf16, originals):
        out = bf16.parent / "out"
        limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "-", MOSAIC_CONVERT, bf16, out, "--workers", "1"]
        done = subprocess.run([str(word) for word in limited], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert "File too large" in done.stderr
        assert "run the same command again" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (out / "mosaic.json").exists()
        assert convert_program(bf16, out).returncode == 0
        same_shards(out, originals / "out")

    def test_the_result_of_another_recipe(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        before = snapshot(out)
        self.refused(bf16, out, "--overwrite", recipe="experts-only")
        assert snapshot(out) == before
        assert run(bf16, out, recipe="experts-only", overwrite=True)[0]
        assert all(result.holds for result in verify(out))
        fresh = bf16.parent / "fresh"
        run(bf16, fresh, recipe="experts-only")
        assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in fresh.iterdir())
        for file in fresh.iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name

    def test_another_source(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        edit_config(bf16, lambda config: config["text_config"].update(rms_norm_eps=1e-5))
        self.refused(bf16, out, "--overwrite")
        assert run(bf16, out, overwrite=True)[0]
        assert all(result.holds for result in verify(out))

    def test_smaller_results_leave_nothing_behind(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        assert (out / "mtp.safetensors").exists()
        recipe = bf16.parent / "text.yaml"
        recipe.write_text("rules: [{part: [mtp, vision], treatment: drop}, {treatment: keep}]")
        run(bf16, out, recipe=str(recipe), overwrite=True)
        assert not (out / "mtp.safetensors").exists()
        assert all(result.holds for result in verify(out))

    @pytest.mark.parametrize("shards", range(5))
    def test_resumed_after_any_shard(self, bf16, originals, monkeypatch, shards):
        """The same bytes as in one go, and nothing done twice."""
        out = bf16.parent / "out"
        write, count = pipeline._write_shard, iter(range(100))

        def stop(plan, shard, *rest):
            if next(count) >= shards:  # and none after it
                raise KeyboardInterrupt
            write(plan, shard, *rest)

        monkeypatch.setattr(pipeline, "_write_shard", stop)
        if shards < 4:
            with pytest.raises(KeyboardInterrupt):
                run(bf16, out)
            assert not (out / "mosaic.json").exists()
        before = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
        assert len(before) == (shards if shards < 4 else 0)
        monkeypatch.setattr(pipeline, "_write_shard", write)
        run(bf16, out)
        assert all(file.stat().st_mtime_ns == stamp for file, stamp in before.items())
        assert sorted(file.name for file in out.iterdir()) == sorted(f.name for f in (originals / "out").iterdir())
        for file in (originals / "out").iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name

    def interrupted(self, folder, out, recipe, monkeypatch):
        """Every shard is there, nothing else."""

        def interrupt(plan, out):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "_complete", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(folder, out, recipe)

    def test_an_unfinished_one_of_another_recipe(self, bf16, monkeypatch):
        out = bf16.parent / "out"
        self.interrupted(bf16, out, "e4m3", monkeypatch)
        before = snapshot(out)
        self.refused(bf16, out, "--overwrite", recipe="experts-only")
        assert snapshot(out) == before
        run(bf16, out, recipe="experts-only", overwrite=True)
        assert all(result.holds for result in verify(out))

    def test_an_unfinished_one_with_more_shards(self, bf16, monkeypatch):
        out = bf16.parent / "out"
        self.interrupted(bf16, out, "e4m3", monkeypatch)
        recipe = bf16.parent / "text.yaml"
        recipe.write_text("rules: [{part: [mtp, vision], treatment: drop}, {treatment: keep}]")
        run(bf16, out, recipe=str(recipe), overwrite=True)
        assert {result.invariant: result.failures for result in verify(out) if not result.holds} == {}

    def test_two_at_once(self, bf16):
        out = bf16.parent / "out"
        (out / ".mosaic-convert").mkdir(parents=True)
        with (out / ".mosaic-convert" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refused(bf16, out, "another mosaic-convert")
            assert [file.name for file in out.rglob("*")] == [".mosaic-convert", "lock"]
        assert run(bf16, out)[0]

    def test_overwriting_while_another_is_at_work(self, bf16, monkeypatch):
        out = bf16.parent / "out"
        self.interrupted(bf16, out, "e4m3", monkeypatch)
        before = snapshot(out)
        with (out / ".mosaic-convert" / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refused(bf16, out, "another mosaic-convert", recipe="experts-only", overwrite=True)
            assert snapshot(out) == before

    def test_a_full_disk(self, bf16, monkeypatch):
        usage = shutil.disk_usage(bf16)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
        self.refused(bf16, bf16.parent / "out", "1,000,000 bytes free")
        assert not (bf16.parent / "out").exists()

    def test_a_full_disk_does_not_cost_the_old_model(self, bf16, monkeypatch):
        """What --overwrite would replace counts as free, but goes only when there is room for the new."""
        out = bf16.parent / "out"
        run(bf16, out, recipe="experts-only")
        before = snapshot(out)
        usage = shutil.disk_usage(bf16)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        bf16_recipe = bf16.parent / "wide.yaml"
        bf16_recipe.write_text("rules: [{treatment: f32}]")
        self.refused(bf16, out, "not enough room", recipe=str(bf16_recipe), overwrite=True)
        assert snapshot(out) == before
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=500_000))
        assert run(bf16, out, recipe="e4m3", overwrite=True)[0]  # smaller than what it replaces


# -------------------------------------------------------------------------------------------------------- recipes


class TestRecipes:
    def refused(self, folder, text, *facts):
        file = folder.parent / "own.yaml"
        file.write_text(text)
        return refused(folder, str(file), *facts, recipe=str(file))

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("rules: [{role: expert, treatment: e4m3}, {treatment: keep}]", "expert"),
            ("rules: [{part: encoder, treatment: keep}]", "encoder"),
            ("rules: [{treatment: int8}]", "int8"),
            ("rules: [{role: norm}]", "rule 1"),
            ("rules: [{treatment: keep}, {role: norm, treatment: keep, layer: 3}]", "rule 2"),
            ("rules: [{role: [norm, 5], treatment: keep}]", "5"),
            ("rules: [{role: {a: b}, treatment: keep}]", "rule 1"),
            ("rules: [keep]", "keep"),
            ("rules: {treatment: keep}", "rules"),
            ("rules: [{treatment: keep}]\nname: x", "name"),
            ("rule: [{treatment: keep}]", "rule"),
            ("- treatment: keep", "treatment"),
            ("", "None"),
            ("rules: [{treatment: keep}", "expected ',' or ']'"),
            ("rules:\n\t- treatment: keep", "cannot start any token"),
            ("rules: !!python/object/apply:os.system [exit]", "python/object"),
        ],
    )
    def test_not_a_recipe(self, bf16, text, shown):
        self.refused(bf16, text, shown)

    def test_not_utf8(self, bf16):
        file = bf16.parent / "own.yaml"
        file.write_bytes(b"rules: \xff\xfe")
        refused(bf16, str(file), recipe=str(file))

    def test_deep_nesting(self, bf16):
        self.refused(bf16, "rules: " + "[" * 5000 + "]" * 5000)

    def test_a_rule_for_no_role_at_all(self, bf16):
        """A role list from which everything was struck out must not turn into a rule for everything."""
        self.refused(bf16, "rules: [{role: [], part: [], treatment: bf16}, {treatment: keep}]")

    @pytest.mark.parametrize("role", ["router", "embedding", "norm", "gate", "convolution", "vision", "mtp_projection"])
    def test_e4m3_for_what_engines_build_unquantised(self, bf16, role):
        error = self.refused(bf16, f"rules: [{{role: {role}, treatment: e4m3}}, {{treatment: keep}}]", role)
        assert "tensor" in error.facts

    @pytest.mark.parametrize("rule", ["part: decoder", "part: outside", "role: norm", "role: lm_head"])
    def test_drop_of_what_the_model_needs(self, bf16, rule):
        self.refused(bf16, f"rules: [{{{rule}, treatment: drop}}, {{treatment: keep}}]", "drop")

    def test_half_of_a_part_dropped(self, bf16):
        """Every vision tensor has the role vision, so only MTP can be halved by a recipe."""
        text = "rules: [{part: mtp, role: norm, treatment: drop}, {treatment: keep}]"
        error = self.refused(bf16, text, "part mtp", "7 of 29")
        assert "half" in error.problem

    def test_no_rule_for_everything(self, bf16):
        error = self.refused(bf16, "rules: [{role: routed_experts, treatment: e4m3}]", "treatment: keep")
        assert "no rule" in error.facts["found"]
        self.refused(bf16, "rules: []", "treatment: keep")

    @pytest.mark.parametrize("name", ["e5m2", "recipes/e4m3.yaml.bak", "", "."])
    def test_no_such_recipe(self, bf16, name):
        with pytest.raises(InputError, match="no such recipe") as refusal:
            run(bf16, bf16.parent / "out", recipe=name)
        assert "experts-only" in refusal.value.facts["expected"]

    def test_the_first_rule_that_matches_wins(self, bf16):
        file = bf16.parent / "own.yaml"
        file.write_text(
            "rules:\n"
            "  - {role: attention, part: mtp, treatment: f32}\n"
            "  - {role: attention, treatment: e4m3}\n"
            "  - treatment: keep\n"
        )
        result, _ = converts(bf16, str(file))
        assert result[MTP].dtype == torch.float32
        assert torch.equal(result[MTP], read_checkpoint(bf16)[MTP].float())
        assert result[KEY].dtype == torch.float8_e4m3fn
        assert result[EXPERT].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------------ CLI


def convert_program(*arguments):
    return subprocess.run([MOSAIC_CONVERT, *map(str, arguments), "--quiet"], capture_output=True, text=True, timeout=60)


class TestProgram:
    @pytest.mark.parametrize(
        "fault", ["model_type", "missing", "unknown", "mis-shaped", "truncated", "absent file", "recipe", "foreign OUT"]
    )
    def test_refusals_exit_with_2_and_write_nothing(self, bf16, fault):
        out, recipe = bf16.parent / "out", "e4m3"
        if fault == "model_type":
            edit_config(bf16, lambda config: config.update(model_type="mixtral"))
        elif fault == "missing":
            edit(bf16, lambda tensors: tensors.pop(NORM))
        elif fault == "unknown":
            edit(bf16, lambda tensors: tensors.update({"model.surprise": torch.ones(1)}))
        elif fault == "mis-shaped":
            edit(bf16, lambda tensors: tensors.update({NORM: tensors[NORM][:-1].clone()}))
        elif fault == "truncated":
            os.truncate(file_of(bf16, NORM), 1000)
        elif fault == "absent file":
            file_of(bf16, NORM).unlink()
        elif fault == "recipe":
            recipe = "e5m2"
        else:
            out.mkdir()
            (out / "precious").write_text("")
        done = convert_program(bf16, out, "--recipe", recipe)
        assert done.returncode == 2
        assert "\nerror: " in f"\n{done.stderr}"
        assert "remedy:" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert not out.exists() or [file.name for file in out.iterdir()] == ["precious"]

    def test_nan_is_refused_and_the_remedy_works(self, bf16):
        set_element(bf16, f"{TEXT}layers.0.linear_attn.in_proj_z.weight", (3, 4), float("nan"))
        out = bf16.parent / "out"
        done = convert_program(bf16, out, "--workers", 1)
        assert done.returncode == 2
        assert "in_proj_z" in done.stderr
        assert "--nonfinite zero" in done.stderr
        done = convert_program(bf16, out, "--nonfinite", "zero", "--overwrite", "--json", "--workers", 1)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["written"] is True
        assert all(result.holds for result in verify(out))

    def test_a_plan_writes_nothing_and_reports_what_is_ignored(self, bf16):
        save_file({"x": torch.ones(1)}, bf16 / "stray.safetensors")
        out = bf16.parent / "out"
        done = convert_program(bf16, out, "--plan", "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["unlisted"] == ["stray.safetensors"]
        assert "stray.safetensors" in done.stderr
        assert not out.exists()

    def test_the_output_does_not_depend_on_the_workers(self, bf16, originals):
        out = bf16.parent / "out"
        assert convert_program(bf16, out, "--workers", 4).returncode == 0
        for file in (originals / "out").iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_index_writer_of_these_tests_is_sound(bf16, originals):
    """`edit` without a change changes nothing that counts."""
    edit(bf16, lambda tensors: None)
    write_index(bf16, json.loads((bf16 / INDEX).read_text())["weight_map"], 1.0)
    converts(bf16)
    same_shards(bf16.parent / "out", originals / "out")
