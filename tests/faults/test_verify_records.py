"""See test_verify. V13 to V17: config.json, the index of experts, the report."""

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
    MTP,
    SECOND,
    TEXT,
    Shard,
    change_json,
    only,
    set_bytes,
    states,
)


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
