"""mosaic-report: tables and page of what was recorded, numbers measured anew, and two directories compared."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mosaic.convert import reader, report
from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.quantize import NonFinite
from mosaic.convert.recipe import ScaleRule, load_recipe
from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError
from mosaic.format.evaluation import EVALUATION_FILE, add_evaluation
from mosaic.format.source import Checkpoint
from support.evaluations import ALONE, COMPARED
from support.faults import set_element
from support.fp8 import read_checkpoint, unfuse, write_official_fp8
from support.models import convert_folder, dequantised, read_tensors
from support.tiny import Tiny, write_checkpoint

PROGRAM = Path(sys.executable).with_name("mosaic-report")
TINY = Tiny(layers=2, interval=2, experts=4, top_k=2)
QUERY = "model.language_model.layers.1.self_attn.q_proj.weight"


def run(*arguments, code=0):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_checkpoint(TINY, folder / "bf16")
    write_checkpoint(Tiny(**{**vars(TINY), "experts_layout": "per_expert"}), folder / "single")
    write_checkpoint(Tiny(**{**vars(TINY), "seed": 5}), folder / "tuned")
    write_official_fp8(folder / "bf16", folder / "fp8")
    convert_folder(folder / "bf16", folder / "out")
    convert_folder(folder / "fp8", folder / "passed")
    with Checkpoint(folder / "bf16") as checkpoint:
        recipe = load_recipe("e4m3-head", ScaleRule.MSE)
        convert(make_plan(checkpoint, recipe), folder / "mse", workers=2, quiet=True)
    return folder


def flip(folder, target, name, position=7):
    """A copy of a directory with one bit of one tensor flipped; links to everything else."""
    target.mkdir()
    listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    for file in folder.iterdir():
        if file.name != listed:
            (target / file.name).symlink_to(file)
    data = bytearray((folder / listed).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])[name]["data_offsets"][0] + position] ^= 1
    (target / listed).write_bytes(data)
    return target


class TestRecorded:
    def test_tables_and_page(self, models, tmp_path):
        done = run(models / "out", "--into", tmp_path / "new" / "folder")
        assert "routed_experts    decoder  e4m3" in done.stdout
        assert "lm_head           outside  keep" in done.stdout
        assert "\nlayer " in done.stdout
        assert done.stdout.count("_proj.weight\n") == 10  # the worst
        page = (tmp_path / "new" / "folder" / "report.html").read_text()
        assert "<svg" in page
        assert (tmp_path / "new/folder/report.json").read_bytes() == (models / "out" / "report.json").read_bytes()
        assert not (models / "out" / "report.html").exists()

    def test_the_page_goes_into_out_and_is_no_part_of_it(self, tmp_path, models):
        out = convert_folder(models / "bf16", tmp_path / "out")
        run(out)
        first = (out / "report.html").read_bytes()
        run(out)
        assert (out / "report.html").read_bytes() == first
        verify = subprocess.run([PROGRAM.with_name("mosaic-verify"), out], capture_output=True)
        assert verify.returncode == 0
        convert_folder(models / "bf16", out, "experts-only", overwrite=True)
        assert not (out / "report.html").exists()  # it told of the other recipe

    def test_json(self, models, tmp_path):
        value = json.loads(run(models / "out", "--json", "--into", tmp_path).stdout)
        assert value == json.loads((models / "out" / "report.json").read_text())

    def test_mse_tells_its_gain(self, models, tmp_path):
        value = json.loads(run(models / "mse", "--json", "--into", tmp_path).stdout)
        by_amax = {e["name"]: e for e in json.loads((models / "out" / "report.json").read_text())["tensors"]}
        searched = [entry for entry in value["tensors"] if entry.get("scale_rule") == "mse"]
        assert {entry["name"] for entry in searched} > {n for n, e in by_amax.items() if e["treatment"] == "e4m3"}
        for entry in searched:
            assert entry["noise"] <= entry["amax_noise"]
            if by_amax[entry["name"]]["treatment"] == "e4m3":
                assert entry["amax_noise"] == by_amax[entry["name"]]["noise"]
        rows = [row for row in value["summary"] if "mse_gain_db" in row]
        assert all(0 < row["mse_gain_db"] < 1 for row in rows)
        assert "gain dB" in run(models / "mse", "--into", tmp_path).stdout
        assert "gain dB" not in run(models / "out", "--into", tmp_path).stdout

    @pytest.mark.parametrize("folder", ["out", "mse", "bf16"])
    def test_models_are_no_folders_for_reports(self, models, folder):
        before = {file: file.read_bytes() for file in (models / folder).iterdir()}
        assert "FOLDER holds a model" in run(models / "out", "--into", models / folder, code=2).stderr
        assert {file: file.read_bytes() for file in (models / folder).iterdir()} == before

    @pytest.mark.parametrize(
        "change",
        [
            lambda value: value.pop("summary"),
            lambda value: value["summary"][0].update(sqnr_db=99.0),
            lambda value: value["summary"].pop(),
            lambda value: value["tensors"][0].update(relative_l2=0.001),
            lambda value: value["tensors"][0].update(signal=None),
            lambda value: value["tensors"][0].update(signal=float("inf")),
            lambda value: value["tensors"][0].update(layer=True),
            lambda value: value["tensors"][0].update(layer=10**400),
            lambda value: value["tensors"][0].update(role=[]),
            lambda value: value["tensors"][0].update(shape=[1.5]),
            lambda value: value["tensors"][0].update(note=5),
            lambda value: value["histograms"][0].pop("role"),
            lambda value: value["histograms"][0].update(layer=float("inf")),
            lambda value: value["histograms"][0]["scales"].update({"1": float("inf")}),
            lambda value: value["histograms"][0]["scales"].update({"9" * 300: 1}),
            lambda value: value["histograms"][0]["codes"].__setitem__(3, -1),
            lambda value: value.update(dropped=[1]),
            lambda value: value.update(recipe=None),
        ],
    )
    def test_numbers_that_cannot_be(self, models, tmp_path, change):
        value = json.loads((models / "out" / "report.json").read_text())
        change(value)
        (tmp_path / "report.json").write_text(json.dumps(value))
        with pytest.raises(InputError, match="not a sound report"):
            report.read(tmp_path / "report.json")

    @pytest.mark.parametrize(
        ("content", "shown"),
        [
            (None, "cannot read"),
            ("{", "not a sound JSON file"),
            ('{"version": 1, "tensors": []}', "another version"),
            ('{"version": true}', "another version"),
            ('{"version": 2}', "not a sound report"),
            ('{"version": 2, "tensors": [5], "histograms": []}', "not a sound report"),
            ('{"version": 2, "tensors": [{"name": "x"}], "histograms": []}', "not a sound report"),
            ('{"version": 2, "tensors": [], "histograms": [{"codes": [1], "scales": {}}]}', "not a sound report"),
        ],
    )
    def test_a_report_that_is_none(self, models, tmp_path, content, shown):
        out = tmp_path / "out"
        out.mkdir()
        for file in (models / "out").iterdir():
            if file.name != "report.json":
                (out / file.name).symlink_to(file)
        if content is not None:
            (out / "report.json").write_text(content)
        assert shown in run(out, code=2).stderr


class TestEvaluations:
    """What mosaic-eval kept beside the model."""

    @pytest.fixture
    def out(self, models, tmp_path):
        out = Path(shutil.copytree(models / "out", tmp_path / "out"))
        for evaluation in (ALONE, COMPARED):
            add_evaluation(out, read_catalog(out).plan_digest, evaluation)
        return out

    def test_are_shown_with_the_report(self, out):
        name = "<script>\x1b[2J\udc80\u202e"
        add_evaluation(out, read_catalog(out).plan_digest, replace(ALONE, text=name, kv=name))
        shown, page = run(out).stdout, (out / "report.html").read_text()
        for found in ("austen.txt", "40.25 +- 0.5", "cpu f32, kv bf16", "checkpoint, BF16 F32", "+1.250% +- 0.100%"):
            assert found in shown
        for found in ("<h2>On texts</h2>", "austen.txt", "40.25 +- 0.5", "0.0375", "96.88%", "and evaluation.json"):
            assert found in page
        assert "<script" not in page
        assert not set(shown + page) & set("\x1b\udc80\u202e")

    def test_join_the_json(self, out, models, tmp_path):
        recorded = json.loads((models / "out" / "report.json").read_text())
        value = json.loads(run(out, "--json", "--into", tmp_path / "new").stdout)
        assert value.pop("evaluations") == json.loads((out / EVALUATION_FILE).read_text())["evaluations"]
        assert value == recorded
        assert report.read(tmp_path / "new" / "report.json")["evaluations"][0]["text"] == "austen.txt"
        assert (out / "report.json").read_bytes() == (models / "out" / "report.json").read_bytes()

    def test_are_no_part_of_the_model(self, out, models):
        assert subprocess.run([PROGRAM.with_name("mosaic-verify"), out], capture_output=True).returncode == 0
        convert_folder(models / "bf16", out)  # complete: nothing to do
        assert (out / EVALUATION_FILE).exists()
        convert_folder(models / "bf16", out, "experts-only", overwrite=True)
        assert not (out / EVALUATION_FILE).exists()  # it told of the other recipe

    def test_a_file_that_is_none_is_refused(self, models, tmp_path):
        out = Path(shutil.copytree(models / "out", tmp_path / "out"))
        (out / EVALUATION_FILE).write_text('{"version": 1}')
        assert "not sound evaluations" in run(out, code=2).stderr


class TestMeasuredAnew:
    @pytest.mark.parametrize(
        ("out", "source"), [("out", "bf16"), ("out", "single"), ("mse", "bf16"), ("passed", "fp8")]
    )
    def test_agrees_with_what_was_recorded(self, models, tmp_path, out, source):
        assert "agrees" in run(models / out, "--against", models / source, "--into", tmp_path).stderr

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_other_sources_and_recipes(self, tmp_path, dtype):
        source = tmp_path / "source"
        write_checkpoint(Tiny(**{**vars(TINY), "dtype": dtype}), source)
        recipe = tmp_path / "own.yaml"
        recipe.write_text("rules: [{part: mtp, treatment: drop}, {role: routed_experts, treatment: e4m3},"
                          " {role: [norm, attention], treatment: bf16}, {treatment: keep}]")  # fmt: skip
        out = convert_folder(source, tmp_path / "out", str(recipe))
        value = json.loads(run(out, "--against", source, "--json").stdout)
        assert {name.split(".")[0] for name in value["dropped"]} == {"mtp"}

    @pytest.mark.parametrize("treatment", ["f32", "bf16"])
    @pytest.mark.parametrize("kind", ["bf16", "fp8"])
    def test_treatments_that_change_nothing(self, models, tmp_path, treatment, kind):
        """The converter measured an error of 0; here the bytes are the same, so nothing was measured."""
        recipe = tmp_path / "own.yaml"
        recipe.write_text(f"rules: [{{treatment: {treatment}}}]")
        out = convert_folder(models / kind, tmp_path / "out", str(recipe))
        assert "agrees" in run(out, "--against", models / kind, "--into", tmp_path / "to").stderr

    def test_a_kept_tensor_with_one_bad_weight(self, models, tmp_path, monkeypatch):
        source = tmp_path / "source"
        shutil.copytree(models / "bf16", source)
        set_element(source, "lm_head.weight", (200, 3), float("nan"))
        monkeypatch.setattr(reader, "SLICE_WEIGHTS", 1)  # not in its first slice
        out = convert_folder(source, tmp_path / "out", nonfinite=NonFinite.ZERO)
        assert "agrees" in run(out, "--against", source, "--into", tmp_path / "to").stderr

    def test_fp8_codes_that_are_not_numbers(self, models, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(models / "fp8", source)
        set_element(source, QUERY, (3, 5), 0x7F)
        out = convert_folder(source, tmp_path / "out", nonfinite=NonFinite.ZERO)
        assert "agrees" in run(out, "--against", source, "--into", tmp_path / "to").stderr

    def test_parts_that_the_checkpoint_lacks_are_named(self, models, tmp_path):
        recipe = tmp_path / "text.yaml"
        recipe.write_text("rules: [{part: mtp, treatment: drop}, {treatment: keep}]")
        source = convert_folder(models / "bf16", tmp_path / "source", str(recipe))
        done = run(models / "fp8", "--against", source)
        assert "were not measured: mtp." in done.stderr

    def test_another_shape_is_refused(self, models, tmp_path):
        write_checkpoint(Tiny(**{**vars(TINY), "experts": 8}), tmp_path / "wide")
        assert "not the same model" in run(models / "fp8", "--against", tmp_path / "wide", code=2).stderr

    def test_weights_that_are_not_numbers(self, tmp_path):
        source = tmp_path / "source"
        write_checkpoint(Tiny(**{**vars(TINY), "dtype": "float32"}), source)
        from support.faults import edit  # writes through the safetensors library

        def spoil(tensors):
            name = next(name for name in tensors if name.endswith("q_proj.weight") and "mtp" not in name)
            tensors[name][3, 5] = float("nan")
            tensors[name][200, 5] = float("inf")

        edit(source, spoil)
        out = convert_folder(source, tmp_path / "out", nonfinite=NonFinite.ZERO)
        value = json.loads(run(out, "--against", source, "--json").stdout)
        assert [entry["nonfinite_zeroed"] for entry in value["tensors"] if "nonfinite_zeroed" in entry] == [2]

    def test_an_official_release_against_the_bf16_one(self, models, tmp_path):
        before = sorted((models / "fp8").iterdir())
        done = run(models / "fp8", "--against", models / "bf16", "--json")
        assert "nothing was written" in done.stderr
        assert sorted((models / "fp8").iterdir()) == before
        value = json.loads(done.stdout)
        source, stored = unfuse(read_checkpoint(models / "bf16")), dequantised(read_tensors(models / "fp8"))
        measured = [entry for entry in value["tensors"] if entry["dtype"] == "F8_E4M3"]
        assert len(measured) > 20
        for entry in measured:
            old, new = source[entry["name"]].double().numpy(), stored[entry["name"]].double().numpy()
            assert entry["relative_l2"] == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old), rel=1e-6)
            assert entry["max_abs_error"] == pytest.approx(np.abs(new - old).max(), rel=1e-6)
        run(models / "fp8", "--against", models / "bf16", "--into", tmp_path)
        assert (tmp_path / "report.html").stat().st_size > 10_000

    def test_another_checkpoint_is_found_out(self, models, tmp_path):
        done = run(models / "out", "--against", models / "tuned", "--into", tmp_path, code=1)
        assert "is not the report of these bytes" in done.stderr
        assert "relative_l2" in done.stderr

    def test_one_flipped_bit_is_found(self, models, tmp_path):
        done = run(flip(models / "out", tmp_path / "flipped", QUERY), "--against", models / "bf16", code=1)
        assert QUERY in done.stderr

    def test_numbers_that_were_made_up(self, models, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        for file in (models / "out").iterdir():
            if file.name != "report.json":
                (out / file.name).symlink_to(file)
        value = json.loads((models / "out" / "report.json").read_text())
        entry = next(entry for entry in value["tensors"] if entry["name"] == QUERY)
        entry |= {"noise": entry["noise"] * 0.5, "signal": entry["signal"] * 0.5}
        value["summary"] = report.summary(value["tensors"])
        (out / "report.json").write_text(json.dumps(value))
        assert f"{QUERY}: noise" in run(out, "--against", models / "bf16", code=1).stderr


class TestCompared:
    def compare(self, *folders):
        return json.loads(run(*folders, "--json").stdout)

    @pytest.mark.parametrize(("one", "two"), [("out", "out"), ("bf16", "single"), ("fp8", "passed")])
    def test_identical(self, models, one, two):
        value = self.compare(models / one, models / two)
        assert value["identical"]
        assert all(entry["equal"] for entry in value["tensors"])
        assert "identical: every tensor has the same bytes" in run(models / one, models / two).stdout

    def test_one_flipped_bit_is_found(self, models, tmp_path):
        other = flip(models / "out", tmp_path / "flipped", QUERY)
        value = self.compare(models / "out", other)
        assert not value["identical"]
        assert [entry["name"] for entry in value["tensors"] if not entry["equal"]] == [QUERY]
        assert QUERY in run(models / "out", other).stdout

    def test_one_flipped_bit_of_a_scale_is_found(self, models, tmp_path):
        other = flip(models / "out", tmp_path / "flipped", f"{QUERY}_scale_inv", 0)
        assert [e["name"] for e in self.compare(models / "out", other)["tensors"] if not e["equal"]] == [QUERY]

    def test_bf16_with_its_conversion(self, models):
        value = self.compare(models / "bf16", models / "out")
        recorded = {e["name"]: e for e in json.loads((models / "out" / "report.json").read_text())["tensors"]}
        for entry in value["tensors"]:
            assert entry["equal"] == (recorded[entry["name"]]["treatment"] == "keep")
            if not entry["equal"]:
                assert entry["dtypes"] == ["BF16", "F8_E4M3"]
                assert entry["sqnr_db"] == pytest.approx(recorded[entry["name"]]["sqnr_db"], abs=1e-5)
        assert "31." in run(models / "bf16", models / "out").stdout

    def test_parts_that_one_side_lacks(self, models, tmp_path):
        recipe = tmp_path / "text.yaml"
        recipe.write_text("rules: [{part: [mtp, vision], treatment: drop}, {treatment: keep}]")
        text = convert_folder(models / "bf16", tmp_path / "text", str(recipe))
        value = self.compare(models / "bf16", text)
        assert not value["identical"]
        assert {name.split(".")[0] for name in value["only_in_first"]} == {"mtp", "model"}
        assert value["only_in_second"] == []
        assert all(entry["equal"] for entry in value["tensors"])
        assert "only in the second" in run(text, models / "bf16").stdout

    def test_models_of_other_shapes(self, models, tmp_path):
        write_checkpoint(Tiny(**{**vars(TINY), "experts": 8}), tmp_path / "wide")
        value = self.compare(models / "bf16", tmp_path / "wide")
        assert any(".mlp.gate.weight" in name for name in value["of_other_shape"])
        assert any(".experts.7." in name for name in value["only_in_second"])

    def test_weights_that_are_not_numbers(self, models, tmp_path):
        tensors = read_tensors(models / "bf16")
        other = flip(models / "bf16", tmp_path / "other", QUERY)
        from safetensors.torch import save_file

        tensors[QUERY][0, 0] = torch.nan
        listed = json.loads((other / "model.safetensors.index.json").read_text())["weight_map"]
        file = other / listed[QUERY]
        save_file({name: tensors[name] for name, place in listed.items() if place == listed[QUERY]}, file)
        value = self.compare(models / "bf16", other)
        assert [e["not_numbers"] for e in value["tensors"] if not e["equal"]] == [1]
        assert "1 weights are not numbers" in run(models / "bf16", other).stdout


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["nowhere"], "nowhere"),
        (["{bf16}"], "not a Mosaic model directory"),
        (["{out}", "nowhere"], "nowhere"),
        (["{out}", "{out}", "--against", "{bf16}"], "do not go together"),
        (["{out}", "{out}", "--into", "x"], "do not go together"),
        (["{out}", "--against", "nowhere"], "nowhere"),
        (["{out}", "--into", "{bf16}/config.json"], "config.json"),
        ([], "OUT"),
    ],
    ids=str,
)
def test_refused(models, arguments, shown):
    arguments = [argument.format(out=models / "out", bf16=models / "bf16") for argument in arguments]
    assert shown in run(*arguments, code=2).stderr
