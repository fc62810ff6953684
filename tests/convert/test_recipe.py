"""What recipes mean: which rule applies, by which rule scales are found, what identifies a recipe."""

import dataclasses
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from mosaic.convert.recipe import Recipe, Rule, ScaleRule, Treatment, load_recipe
from mosaic.format.tensors import QUANTIZABLE, Part, Role, TensorSpec
from mosaic.recipes import FOLDER

#: As they were when amax was the only scale rule: conversions of then must still count as the same ones.
DIGESTS = {
    "e4m3": "94e97fb7ab4ea42247f6ae48d865e79b31f28ef13296f90cca7f5caa8ea43430",
    "e4m3-head": "2264abd3e37a6e33c6e9bfb402652c284eb1dbf2f300fe2f8e8b436c348691a0",
    "experts-only": "13fc2078dba6c8dce4b18bc3e966ff31e5472cde4029664d5d32147b8a7d672a",
}
MIXED = """\
# Attention needs the better scales.
rules:
  - role: attention
    treatment: e4m3
    scale: mse
  - role: lm_head
    treatment: e4m3
    scale: amax
  - role: [routed_experts, shared_expert]
    treatment: e4m3
  - treatment: keep
"""
PLAIN = MIXED.replace("    scale: mse\n", "").replace("    scale: amax\n", "")


def tensor(role, part=Part.DECODER):
    return TensorSpec("key", "name", (128, 128), Role(role), Part(part), ())


@pytest.fixture
def load(tmp_path):
    def load(text, scale=ScaleRule.AMAX):
        file = tmp_path / "own.yaml"
        file.write_text(text)
        return load_recipe(str(file), scale)

    return load


class TestShipped:
    @pytest.mark.parametrize("name", [file.stem for file in sorted(FOLDER.glob("*.yaml"))])
    def test_digests_stay(self, name):
        assert load_recipe(name).digest == DIGESTS[name]
        assert load_recipe(name, ScaleRule.MSE).digest not in DIGESTS.values()

    @pytest.mark.parametrize(
        ("name", "kept"),
        [
            ("e4m3", {Role.LM_HEAD}),
            ("e4m3-head", set()),
            ("experts-only", QUANTIZABLE - {Role.ROUTED_EXPERTS}),
        ],
    )
    def test_what_they_quantise(self, name, kept):
        recipe = load_recipe(name)
        for role in Role:
            expected = Treatment.E4M3 if role in QUANTIZABLE - kept else Treatment.KEEP
            assert {recipe.treatment(tensor(role, part)) for part in Part} == {expected}, role

    def test_a_file_named_like_one(self, tmp_path, monkeypatch):
        """The shipped one goes by its name, the other by its path."""
        shutil.copy(FOLDER / "experts-only.yaml", tmp_path / "e4m3.yaml")
        shutil.copy(FOLDER / "experts-only.yaml", tmp_path / "e4m3")
        monkeypatch.chdir(tmp_path)
        assert load_recipe("e4m3").digest == DIGESTS["e4m3"]
        for path in ("./e4m3.yaml", "e4m3.yaml", "./e4m3", str(tmp_path / "e4m3.yaml")):
            own = load_recipe(path)
            assert (own.name, own.digest) == ("e4m3", DIGESTS["experts-only"])


def test_the_document_lists_what_there_is(load):
    """docs/FORMAT.md section 6: its example is a recipe, and its lists of names are complete."""
    section = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text().split("\n## 6. ")[1]
    prose, example = section.split("\n\n")[:2]
    assert [rule.treatment for rule in load(textwrap.dedent(example)).rules] == ["drop", "e4m3", "keep"]
    for names in (Role, Part, Treatment, ScaleRule):
        assert {*names} <= {*re.findall(r"\w+", prose)}
    able = re.search(r"Roles:(.*) \(these may be e4m3\)", prose, re.DOTALL)[1]
    assert {*re.findall(r"\w+", able)} == QUANTIZABLE


class TestScaleRules:
    @pytest.mark.parametrize("given", ScaleRule)
    def test_a_rule_that_names_one_has_its_way(self, load, given):
        recipe = load(MIXED, given)
        assert recipe.scale_rule(tensor("attention")) is ScaleRule.MSE
        assert recipe.scale_rule(tensor("lm_head")) is ScaleRule.AMAX
        assert recipe.scale_rule(tensor("shared_expert")) is given

    def test_the_treatment_is_e4m3_either_way(self, load):
        assert load(MIXED).treatment(tensor("attention")) is Treatment.E4M3

    def test_amax_unless_told_otherwise(self, load):
        assert load(MIXED).scale is ScaleRule.AMAX
        assert [rule.scale for rule in load(MIXED).rules] == [ScaleRule.MSE, ScaleRule.AMAX, None, None]

    def test_the_digest_covers_them(self, load):
        """Which rule has which: four recipes that quantise the same tensors."""
        swapped = MIXED.replace("mse", "other").replace("amax", "mse").replace("other", "amax")
        recipes = [load(PLAIN), load(PLAIN, ScaleRule.MSE), load(MIXED), load(swapped)]
        assert len({recipe.digest for recipe in recipes}) == 4

    def test_the_digest_is_of_what_is_done_not_of_how_it_was_said(self, load):
        said = load(MIXED.replace("mse", "amax"))
        assert said.digest == load(PLAIN).digest
        assert load(MIXED, ScaleRule.MSE).digest != load(MIXED, ScaleRule.AMAX).digest

    def test_a_recipe_without_e4m3_has_none(self, load):
        text = "rules: [{role: norm, treatment: f32}, {treatment: keep}]"
        assert load(text, ScaleRule.MSE).digest == load(text).digest

    def test_the_digest_of_no_scale_rule_is_the_old_one(self, load):
        """json.dumps([[treatment, roles, parts], ...]), as it has always been."""
        text = "rules: [{role: [norm, decay], part: mtp, treatment: f32}, {treatment: keep}]"
        assert load(text).digest == "367902bf28e0a792962a759ec87aca2c08620aab2b50b768264a356a3c963a62"


class TestRules:
    def test_comments_and_lines_do_not_count(self, load):
        """Equal rules are equal wherever they stand."""
        here, there = load(MIXED), load(f"# Moved down.\n\n{MIXED}")
        assert [rule.line for rule in here.rules] == [3, 6, 9, 11]
        assert [rule.line for rule in there.rules] == [5, 8, 11, 13]
        assert here.rules == there.rules
        assert hash(here.rules) == hash(there.rules)
        assert here.digest == there.digest

    def test_every_way_to_write_one(self, load):
        recipe = load(
            "\ufeff%YAML 1.1\n---\n'rules':\r\n"
            "- {\"role\": [norm, 'decay'], part: mtp, treatment: f32}   # flow\r\n"
            "-\r\n  role:\r\n  - router\r\n  - gate\r\n  treatment: bf16\r\n"
            "- treatment:\r\n    keep\r\n...\r\n"
        )
        mtp, none = frozenset({Part.MTP}), frozenset()
        assert recipe.rules == (
            Rule(Treatment.F32, frozenset({Role.NORM, Role.DECAY}), mtp),
            Rule(Treatment.BF16, frozenset({Role.ROUTER, Role.GATE}), none),
            Rule(Treatment.KEEP, none, none),
        )
        assert [rule.line for rule in recipe.rules] == [4, 6, 10]

    def test_the_first_that_matches_wins(self, load):
        recipe = load(
            "rules:\n- {role: attention, part: mtp, treatment: f32}\n- {role: attention, treatment: e4m3}\n"
            "- {part: mtp, treatment: bf16}\n- treatment: keep\n"
        )
        expected = {
            ("attention", "mtp"): Treatment.F32,
            ("attention", "decoder"): Treatment.E4M3,
            ("norm", "mtp"): Treatment.BF16,
            ("norm", "decoder"): Treatment.KEEP,
        }
        assert {pair: recipe.treatment(tensor(*pair)) for pair in expected} == expected

    @pytest.mark.parametrize(
        ("first", "second", "covered"),
        [
            (((), ()), ((), ()), True),
            (((), ()), (("norm",), ("mtp",)), True),
            ((("norm",), ()), (("norm",), ("mtp",)), True),
            ((("norm", "gate"), ("mtp",)), (("norm",), ("mtp",)), True),
            ((tuple(Role), ()), ((), ()), True),
            (((), tuple(Part)), (("norm",), ()), True),
            ((("norm",), ()), ((), ()), False),
            ((("norm",), ("mtp",)), (("norm",), ()), False),
            ((("norm",), ()), (("norm", "gate"), ()), False),
            (((), ("mtp",)), (("norm",), ()), False),
            ((("norm",), ("mtp",)), (("gate",), ("mtp",)), False),
        ],
    )
    def test_what_covers_what(self, first, second, covered):
        def rule(roles, parts):
            return Rule(Treatment.KEEP, frozenset(map(Role, roles)), frozenset(map(Part, parts)))

        assert rule(*first).covers(rule(*second)) is covered
        pairs = [tensor(role, part) for role in Role for part in Part if rule(*second).matches(tensor(role, part))]
        assert all(rule(*first).matches(one) for one in pairs) is covered

    def test_a_recipe_made_by_hand(self, tmp_path):
        """Fields beyond the first three have their defaults."""
        rule = Rule(Treatment.KEEP, frozenset(), frozenset())
        recipe = Recipe("own", tmp_path, (rule,))
        assert recipe.scale is ScaleRule.AMAX
        assert dataclasses.replace(rule, line=7) == rule
        assert dataclasses.replace(rule, scale=ScaleRule.MSE) != rule
