"""What conversion promises: identical bytes where they should be, the right numbers where they differ."""

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mosaic.convert import reader, report, shard
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.convert.shard import ShardConversion
from mosaic.convert.verify import verify
from mosaic.format import architectures, index
from mosaic.format.source import Checkpoint
from support.configs import MOE_30B
from support.fp8 import read_checkpoint, unfuse, write_official_fp8
from support.listing import Entry, pack, total_bytes, write_sparse_checkpoint
from support.memory import peak_memory
from support.models import convert_folder, dequantised, read_tensors, same_bytes
from support.tiny import Tiny, write_checkpoint

FAMILIES = {
    "3.6": Tiny(),
    "3.6-per-expert": Tiny(experts_layout="per_expert"),
    "3.5": Tiny(variant="3.5"),
    "3.5-per-expert": Tiny(variant="3.5", experts_layout="per_expert"),
    "next": Tiny(family="qwen3_next"),
    "moe": Tiny(family="qwen3_moe"),
    "moe-dense-layer": Tiny(family="qwen3_moe", mlp_only_layers=(1,)),
    "tied": Tiny(tie=True),
}
QUANTIZED_ROLES = {"routed_experts", "shared_expert", "dense_mlp", "attention", "linear_attention"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder of a tiny checkpoint, made once."""
    root = tmp_path_factory.mktemp("sources")

    def make(name: str):
        folder = root / name
        if not folder.exists():
            write_checkpoint(FAMILIES[name], folder)
        return folder

    return make


def tree(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_converts_soundly(source, tmp_path, name):
    out = convert_folder(source(name), tmp_path / "out")
    assert [result.invariant for result in verify(out) if not result.holds] == []
    before, after = unfuse(read_checkpoint(source(name))), read_tensors(out)
    entries = {entry["name"]: entry for entry in json.loads((out / report.REPORT_FILE).read_text())["tensors"]}
    assert entries.keys() == before.keys()
    for key, tensor in before.items():
        if entries[key]["role"] in QUANTIZED_ROLES:
            assert after[key].dtype is torch.float8_e4m3fn
        else:
            assert same_bytes(after[key], tensor), key  # kept tensors are byte-identical
    weights = dequantised(after)
    for key, tensor in before.items():
        bound = 16 * after[f"{key}_scale_inv"].max().item() if f"{key}_scale_inv" in after else 0.0
        assert (weights[key] - tensor.float()).abs().max() <= bound, key


@pytest.mark.parametrize("variant", ["3.6", "3.5"])
def test_fused_and_per_expert_sources_give_the_same_bytes(source, tmp_path, variant):
    fused = tree(convert_folder(source(variant), tmp_path / "fused"))
    single = tree(convert_folder(source(f"{variant}-per-expert"), tmp_path / "single"))
    assert fused.keys() == single.keys()
    different = {name for name in fused if fused[name] != single[name]}
    assert different <= {"mosaic.json"}  # which tells the sources apart
    assert "model.safetensors.index.json" in fused
    assert index.EXPERTS_FILE in fused


@pytest.mark.parametrize("name", ["3.6", "3.5", "next", "moe", "moe-dense-layer"])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_fp8_passes_through(source, tmp_path, name, scale_dtype):
    official = tmp_path / "official"
    write_official_fp8(source(name), official, scale_dtype=scale_dtype)
    out = convert_folder(official, tmp_path / "out")
    assert [result.invariant for result in verify(out) if not result.holds] == []
    before, after = read_checkpoint(official), read_tensors(out)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert same_bytes(tensor, after[key]), key
    assert any(key.endswith("_scale_inv") and tensor.dtype is scale_dtype for key, tensor in after.items())
    old, new = (set(json.loads((f / "config.json").read_text())["quantization_config"]["modules_to_not_convert"])
                for f in (official, out))  # fmt: skip
    assert {entry for entry in old ^ new if ".norm" not in entry} == set()


@pytest.mark.parametrize("kind", ["bf16", "fp8", "f32-scales"])
def test_tensors_of_many_slices(source, tmp_path, monkeypatch, kind):
    """Slices are read into memory that is used again: nothing may be kept in it."""
    folder = source("3.6")
    if kind != "bf16":
        folder = tmp_path / "official"
        write_official_fp8(source("3.6"), folder, scale_dtype=torch.float32 if kind == "f32-scales" else torch.bfloat16)
    whole = tree(convert_folder(folder, tmp_path / "whole"))
    monkeypatch.setattr(reader, "SLICE_WEIGHTS", 1)
    monkeypatch.setattr(shard, "READ_AHEAD", 1)
    monkeypatch.setattr(shard, "READERS", 1)
    sliced = tree(convert_folder(folder, tmp_path / "sliced"))
    assert {name for name in whole if whole[name] != sliced[name]} <= {"report.json", "mosaic.json"}  # order of sums


def test_converting_the_output_again_changes_nothing(source, tmp_path):
    once = convert_folder(source("3.6"), tmp_path / "once")
    twice = convert_folder(once, tmp_path / "twice")
    for file in once.glob("*.safetensors"):
        assert filecmp.cmp(file, twice / file.name, shallow=False)
    assert (once / "config.json").read_bytes() == (twice / "config.json").read_bytes()


def test_workers_do_not_show(source, tmp_path):
    assert tree(convert_folder(source("3.6"), tmp_path / "one", workers=1)) == tree(
        convert_folder(source("3.6"), tmp_path / "many", workers=7)
    )


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_stopped_conversion_resumes_to_the_same_bytes(source, tmp_path, monkeypatch, stop_after):
    limit = stop_after
    whole = tree(convert_folder(source("3.6"), tmp_path / "whole"))
    write_shard, calls = ShardConversion.run, []

    def failing(self, *rest):
        calls.append(self._shard.layout.file)
        if len(calls) > limit:
            raise KeyboardInterrupt
        write_shard(self, *rest)

    out = tmp_path / "out"
    monkeypatch.setattr(ShardConversion, "run", failing)
    with pytest.raises(KeyboardInterrupt):
        convert_folder(source("3.6"), out, workers=1)
    assert not (out / "mosaic.json").exists()
    assert len(list(out.glob("*.safetensors"))) == stop_after
    done = set(calls[:stop_after])
    calls.clear()
    limit = len(whole)
    convert_folder(source("3.6"), out, workers=1)
    assert not done & set(calls)
    assert tree(out) == whole


def test_report_agrees_with_an_independent_computation(source, tmp_path):
    out = convert_folder(source("3.5"), tmp_path / "out")
    before, after = unfuse(read_checkpoint(source("3.5"))), read_tensors(out)
    weights = dequantised(after)
    value = json.loads((out / report.REPORT_FILE).read_text())
    for entry in value["tensors"]:
        if entry["treatment"] != "e4m3":
            continue
        old, new = before[entry["name"]].double().numpy(), weights[entry["name"]].double().numpy()
        signal, noise = np.square(old).sum(), np.square(new - old).sum()
        scales = after[f"{entry['name']}_scale_inv"].float()
        # The report sums float64 squares of float32 differences: relative error of a few float32 ulps.
        assert entry["relative_l2"] == pytest.approx(np.sqrt(noise / signal), rel=1e-6)
        assert entry["sqnr_db"] == pytest.approx(10 * np.log10(signal / noise), abs=1e-5)
        assert entry["max_abs_error"] == pytest.approx(np.abs(new - old).max(), rel=1e-6)
        assert entry["zeroed_share"] == np.count_nonzero((new == 0) & (old != 0)) / old.size
        assert (entry["scale_min"], entry["scale_max"]) == (scales.min().item(), scales.max().item())
    experts = next(row for row in value["summary"] if (row["role"], row["part"]) == ("routed_experts", "decoder"))
    assert experts["tensors"] == 4 * 16 * 3
    assert 0.02 < experts["relative_l2"] < 0.03  # 2.6 % for well-behaved weights


def test_recipes_choose_what_is_quantised(source, tmp_path):
    def dtypes(recipe):
        out = convert_folder(source("3.6"), tmp_path / recipe.replace("/", "_"), recipe)
        assert [result.invariant for result in verify(out) if not result.holds] == []
        return {name: tensor.dtype for name, tensor in read_tensors(out).items()}, out

    head, _ = dtypes("e4m3-head")
    assert head["lm_head.weight"] is torch.float8_e4m3fn
    only, _ = dtypes("experts-only")
    quantised = {name for name, dtype in only.items() if dtype is torch.float8_e4m3fn}
    assert quantised == {name for name in only if ".mlp.experts." in name and not name.endswith("_scale_inv")}
    own = tmp_path / "own.yaml"
    own.write_text(
        "rules:\n- part: [vision, mtp]\n  treatment: drop\n- role: routed_experts\n  treatment: bf16\n"
        "- role: norm\n  treatment: f32\n- treatment: keep\n"
    )
    mine, out = dtypes(str(own))
    assert not [name for name in mine if name.startswith(("mtp.", "model.visual."))]
    assert mine["model.language_model.norm.weight"] is torch.float32
    assert torch.float8_e4m3fn not in mine.values()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    rows = index.read_index(out / index.EXPERTS_FILE)
    assert {row["code_dtype"] for row in rows} == {b"BF16"}
    assert set(json.loads((out / report.REPORT_FILE).read_text())["dropped"]) == {
        name for name in unfuse(read_checkpoint(source("3.6"))) if name.startswith(("mtp.", "model.visual."))
    }


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_float_sources(tmp_path, dtype):
    write_checkpoint(Tiny(dtype=dtype), tmp_path / "source")
    out = convert_folder(tmp_path / "source", tmp_path / "out")
    assert [result.invariant for result in verify(out) if not result.holds] == []
    before, after = unfuse(read_checkpoint(tmp_path / "source")), read_tensors(out)
    assert same_bytes(after["lm_head.weight"], before["lm_head.weight"])
    assert all(name.endswith("_scale_inv") or name in before for name in after)


def test_overwrite_replaces_the_result_of_another_recipe(source, tmp_path):
    out = convert_folder(source("3.6"), tmp_path / "out")
    expected = tree(convert_folder(source("3.6"), tmp_path / "expected", "experts-only"))
    convert_folder(source("3.6"), out, "experts-only", overwrite=True)
    assert tree(out) == expected


def test_the_library_of_the_format_reads_the_index(source, tmp_path):
    """experts.npy leads to the very bytes the safetensors library finds under the names."""
    out = convert_folder(source("3.6"), tmp_path / "out")
    tensors = read_tensors(out)
    rows = np.load(out / index.EXPERTS_FILE)
    assert len(rows) == 4 * 16
    for row in rows:
        name = f"model.language_model.layers.{row['layer']}.mlp.experts.{row['expert']}"
        parts = [tensors[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down")]
        scales = [tensors[f"{name}.{kind}_proj.weight_scale_inv"] for kind in ("gate", "up", "down")]
        data = (out / row["shard"].decode()).read_bytes()
        expected = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
        assert data[row["offset"] :][: len(expected)] == expected
        assert [row["gate_nbytes"], row["up_nbytes"], row["down_nbytes"]] == [part.numel() for part in parts]
        expected_scales = b"".join(scale.view(torch.uint8).numpy().tobytes() for scale in scales)
        assert data[row["scale_offset"] :][: row["scale_nbytes"]] == expected_scales


def test_plan_depends_on_nothing_but_headers_and_options(source, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(source("3.6"), copy)
    recipe = load_recipe("e4m3")
    with Checkpoint(source("3.6")) as here, Checkpoint(copy) as there:
        assert make_plan(here, recipe).digest == make_plan(there, recipe).digest
        assert make_plan(here, recipe).digest != make_plan(here, load_recipe("e4m3-head")).digest


def test_a_whole_conversion_loads_no_torch(source, tmp_path):
    program = (
        "import sys; from mosaic.convert.cli import app; from mosaic.convert.verify_cli import app as verify;"
        "app(sys.argv[1:], standalone_mode=False); verify(sys.argv[2:], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(source("3.6")), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
def test_memory_is_bounded_by_slices_not_by_layers(tmp_path):
    """A layer of the 30B's true shape (1.2 GB of experts) and its vocabulary, from holes; then verify. 110 MB seen."""
    config = MOE_30B | {"num_hidden_layers": 1, "max_window_layers": 1}
    architecture = architectures.find(config, tmp_path)
    tensors = architecture.tensors(architecture.parse(config, tmp_path), config, [])
    pieces = {tensor.pieces[-1].name: tensor.pieces[-1] for tensor in tensors}
    files = pack([Entry(name, "BF16", piece.shape) for name, piece in pieces.items()], "model", 2)
    write_sparse_checkpoint(tmp_path / "source", config, files, total_bytes(files))
    assert total_bytes(files) > 2 << 30
    programs = Path(sys.executable).parent
    for command in (("mosaic-convert", tmp_path / "source"), ("mosaic-verify",)):
        assert peak_memory(programs / command[0], *command[1:], tmp_path / "out") < 250e6, command
