"""Checkpoints that are unusual but sound: they convert, and mean the same afterwards."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mosaic.convert.quantize import NonFinite
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint, is_block_fp8
from support.faults import (
    EMBEDDING,
    EXPERT,
    HEAD,
    KEY,
    NORM,
    QUERY,
    TEXT,
    assert_same_tensors,
    converts,
    edit,
    edit_config,
    file_of,
    means_the_source,
    names_everything,
    refused,
    refused_while_reading,
    run,
    same_shards,
    set_element,
)
from support.fp8 import dequantise, quantise, read_checkpoint, unfuse, write_official_fp8
from support.tiny import Tiny, write_checkpoint


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


def as_bytes(tensors):
    """E4M3 codes as the tools write them whose arrays have no such type."""
    return {n: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for n, t in tensors.items()}


class TestCodesInBytes:
    """U8 with scales in a block-FP8 checkpoint is F8_E4M3."""

    def same_as_its_twin(self, folder, recipe="e4m3", nonfinite=NonFinite.REFUSE, change=as_bytes):
        """But for the digests of the source, which is another file."""
        run(folder, folder.parent / "twin", recipe, nonfinite)
        edit(folder, change)
        assert torch.uint8 in {tensor.dtype for tensor in read_checkpoint(folder).values()}
        _, report = converts(folder, recipe, nonfinite)
        twin, out = ({f.name: f.read_bytes() for f in (folder.parent / name).iterdir()} for name in ("twin", "out"))
        catalogs = [json.loads(files.pop("mosaic.json")) for files in (twin, out)]
        assert out == twin
        differing = {key for key, value in catalogs[0].items() if catalogs[1][key] != value}
        assert differing == {"source_fingerprint", "plan_digest"}
        return report

    def test_passes_through(self, fp8):
        report = self.same_as_its_twin(fp8)
        assert {e["treatment"] for e in report["tensors"] if e["dtype"] == "F8_E4M3"} == {"pass-through"}

    def test_one_of_many(self, fp8):
        self.same_as_its_twin(fp8, change=lambda tensors: tensors.update({KEY: tensors[KEY].view(torch.uint8)}))

    def test_wide_scales(self, bf16, tmp_path):
        write_official_fp8(bf16, tmp_path / "fp8", torch.float32)
        self.same_as_its_twin(tmp_path / "fp8")

    def test_fused_experts(self, bf16, fp8):
        """Stacks of codes with stacks of scales, as FP8 checkpoints of fused experts have them."""
        shutil.copy(fp8 / "config.json", bf16)

        def stack(tensors):
            for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
                pairs = [quantise(matrix) for matrix in tensors[name]]
                tensors[name], tensors[f"{name}_scale_inv"] = (torch.stack(group) for group in zip(*pairs, strict=True))

        edit(bf16, stack)
        self.same_as_its_twin(bf16)

    def test_dequantised(self, fp8):
        file = fp8.parent / "bf16.yaml"
        file.write_text("rules: [{role: attention, treatment: bf16}, {treatment: keep}]")
        report = self.same_as_its_twin(fp8, str(file))
        assert {e["dtype"] for e in report["tensors"] if e["role"] == "attention"} == {"BF16"}

    def test_fmt_need_not_be_said(self, fp8):
        edit_config(fp8, lambda config: config["quantization_config"].pop("fmt"))
        self.same_as_its_twin(fp8)

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    def test_nan_codes(self, fp8, code):
        edit(fp8, as_bytes)
        set_element(fp8, QUERY, (130, 7), code)
        error = refused_while_reading(fp8, QUERY, f"code 0x{code:02X} at [130, 7]", str(file_of(fp8, QUERY)))
        assert "not numbers" in error.problem

    def test_nan_codes_set_to_zero(self, fp8):
        set_element(fp8, QUERY, (130, 7), 0x7F)
        report = self.same_as_its_twin(fp8, nonfinite=NonFinite.ZERO)
        assert {e["name"]: e["nonfinite_zeroed"] for e in report["tensors"] if "nonfinite_zeroed" in e} == {QUERY: 1}

    def test_without_scales(self, fp8):
        edit(fp8, as_bytes)
        edit(fp8, lambda tensors: tensors.pop(f"{EXPERT}_scale_inv"))
        error = refused(fp8, EXPERT, f"U8, no {EXPERT}_scale_inv", str(file_of(fp8, EXPERT)))
        assert error.facts["tensor"] == EXPERT

    def test_without_a_configuration_that_says_so(self, fp8):
        edit(fp8, as_bytes)
        edit_config(fp8, lambda config: config.pop("quantization_config"))
        error = refused(fp8, "U8 with scales, but no block FP8 in quantization_config")
        assert error.facts["tensor"] + "_scale_inv" in read_checkpoint(fp8)

    @pytest.mark.parametrize(
        "change",
        [{"weight_block_size": [64, 64]}, {"quant_method": "gptq"}, {"fmt": "e5m2"}, {"weight_block_size": None}],
        ids=str,
    )
    def test_with_a_configuration_that_says_otherwise(self, fp8, change):
        edit(fp8, as_bytes)
        edit_config(fp8, lambda config: config["quantization_config"].update(change))
        assert not is_block_fp8(json.loads((fp8 / "config.json").read_text()))
        refused(fp8, "config.json", *map(str, change.values()))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float64])
    def test_with_scales_of_another_dtype(self, fp8, dtype):
        scale = f"{QUERY}_scale_inv"
        edit(fp8, as_bytes)
        edit(fp8, lambda tensors: tensors.update({scale: torch.ones(4, 2).to(dtype)}))
        error = refused(fp8, QUERY, scale)
        assert error.facts["tensor"] == QUERY

    @pytest.mark.parametrize("shape", [(2, 4), (), (512, 1)])
    def test_with_another_grid(self, fp8, shape):
        scale = f"{QUERY}_scale_inv"
        edit(fp8, as_bytes)
        edit(fp8, lambda tensors: tensors.update({scale: torch.ones(shape, dtype=torch.bfloat16)}))
        assert refused(fp8, str(list(shape)), "[4, 2]").facts["tensor"] == scale

    def test_what_is_no_matrix(self, fp8):
        edit(fp8, lambda tensors: tensors.update({NORM: torch.ones(256, dtype=torch.uint8)}))
        assert f"U8, no {NORM}_scale_inv" in refused(fp8).facts["found"]
        edit(fp8, lambda tensors: tensors.update({f"{NORM}_scale_inv": torch.ones(2, 1)}))
        assert "FP8 matrix" in refused(fp8, NORM).facts["expected"]

    def test_signed_bytes_are_not_codes(self, fp8):
        edit(fp8, lambda tensors: tensors.update({QUERY: tensors[QUERY].view(torch.int8)}))
        assert refused(fp8, QUERY).facts["found"] == "I8"


class TestOtherConventions:
    """FP8 that other tools write: refused by name, never guessed at."""

    @pytest.mark.parametrize("shape", [None, (), (1,), (512, 1)], ids=str)
    def test_weight_scale(self, fp8, shape):
        """Per block as it would be taken, per tensor, per row: under this name none is."""
        name = f"{QUERY}_scale"

        def change(tensors):
            scale = tensors.pop(f"{QUERY}_scale_inv")
            tensors[name] = scale if shape is None else torch.ones(shape, dtype=torch.bfloat16)

        edit(fp8, change)
        error = refused(fp8, f"no {QUERY}_scale_inv, but {name}")
        assert error.facts["tensor"] == QUERY
        assert "reciprocal" in error.facts["remedy"]

    def test_weight_scale_for_every_weight(self, fp8):
        edit(fp8, lambda tensors: {name.removesuffix("_inv"): tensor for name, tensor in tensors.items()})
        assert "reciprocal" in refused(fp8, "weight_scale").facts["remedy"]

    @pytest.mark.parametrize("name", [f"{QUERY}_scale", QUERY.replace(".weight", ".input_scale")])
    def test_one_scale_more(self, fp8, name):
        edit(fp8, lambda tensors: tensors.update({name: torch.ones(4, 2, dtype=torch.bfloat16)}))
        error = refused(fp8, name)
        assert "no rule covers" in error.problem

    @pytest.mark.parametrize("shape", [(2, 1), (1,), (), (128,), (128, 1), (1, 256), (1, 2, 1)], ids=str)
    def test_scales_of_an_expert_in_another_shape(self, fp8, shape):
        """Transposed, per tensor, per row, per column."""
        scale = f"{EXPERT}_scale_inv"
        assert read_checkpoint(fp8)[scale].shape == (1, 2)
        edit(fp8, lambda tensors: tensors.update({scale: torch.ones(shape, dtype=torch.bfloat16)}))
        assert refused(fp8, str(list(shape)), "[1, 2]").facts["tensor"] == scale

    @pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
    def test_weights_in_another_kind_of_fp8(self, fp8, dtype):
        edit(fp8, lambda tensors: tensors.update({QUERY: tensors[QUERY].view(dtype)}))
        error = refused(fp8, QUERY, str(file_of(fp8, QUERY)))
        assert error.facts["found"] == f"F8_{str(dtype).removeprefix('torch.float8_').upper()}"
