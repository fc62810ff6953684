"""Recipes that cannot be meant."""

import pytest
import torch

from mosaic.format.errors import InputError
from support.faults import EXPERT, KEY, MTP, converts, refused, run
from support.fp8 import read_checkpoint


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
