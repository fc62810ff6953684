"""Weights that are no numbers: refused while they are read, or set to 0 and reported."""

import pytest
import torch

from mosaic.convert.plan import make_plan
from mosaic.convert.quantize import NonFinite
from mosaic.convert.recipe import load_recipe
from mosaic.format.source import Checkpoint
from support.faults import (
    EMBEDDING,
    EXPERT,
    FUSED,
    NORM,
    QUERY,
    VISION,
    assert_same_tensors,
    converts,
    edit,
    file_of,
    means_the_source,
    refused_while_reading,
    set_element,
)
from support.fp8 import read_checkpoint

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
