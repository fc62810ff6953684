"""Recipes that cannot be meant: refused with the line that is wrong, what stands there and what might."""

import re

import pytest
import torch

from mosaic.convert.recipe import load_recipe
from mosaic.format.errors import InputError
from support.faults import EXPERT, KEY, MTP, convert_program, converts, names_everything, refused, run
from support.fp8 import read_checkpoint

KEEP = "- treatment: keep\n"
TREATMENTS = "one of e4m3, keep, bf16, f32, drop"


def not_a_recipe(tmp_path, content, line):
    """The facts of the refusal, each in one line."""
    file = tmp_path / "own.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as refusal:
        load_recipe(str(file))
    error = refusal.value
    names_everything(error)
    assert error.problem == "not a recipe"
    assert error.facts["file"] == (f"{file}:{line}" if line else str(file))
    assert not re.search(r"[\n\r]", "".join(error.facts.values()))
    assert len(str(error)) < 600
    return error.facts


class TestSchema:
    @pytest.mark.parametrize(
        ("text", "line", "found", "expected"),
        [
            ("", 1, "nothing", "`rules:`"),
            ("# nothing but a comment\n\n", 1, "nothing", "`rules:`"),
            ("keep", 1, "'keep'", "`rules:`"),
            (f"\n{KEEP}", 2, "a list", "`rules:`"),
            ("{}", 1, "without `rules`", "`rules:`"),
            ("rules:\n", 1, "nothing as `rules`", "a list of rules"),
            ("rules: keep", 1, "'keep' as `rules`", "a list of rules"),
            ("\nrules:\n  treatment: keep", 3, "a mapping as `rules`", "a list of rules"),
            ("\nrules: []", 2, "an empty list", "a rule for every tensor"),
            (f"rules:\n{KEEP}- keep", 3, "'keep'", "a rule {role, part, treatment, scale}"),
            (f"rules:\n{KEEP}-\n", 3, "nothing", "a rule {"),
            (f"rules:\n{KEEP}- [treatment, keep]", 3, "a list", "a rule {"),
            ("rules:\n- role: norm\n  part: mtp\n- treatment: keep", 2, "without treatment", "a rule {"),
            ("rules:\n- {}", 2, "without treatment", "a rule {"),
            (f"rules:\n{KEEP}name: x", 3, "key 'name'", "rules"),
            (f"? [rules]\n: {KEEP}", 1, "a list", "`rules:`"),
            ("rules:\n- treatment: keep\n  layer: 3", 3, "key 'layer'", "one of role, part, treatment, scale"),
            ("rules:\n- treatment: keep\n  no: 3", 3, "key 'no', which YAML takes for true or false", "one of role"),
            ("rules:\n- treatment: keep\n  '': 3", 3, "no key", "one of role"),
            ("rules:\n- treatment: int8", 2, "treatment 'int8'", TREATMENTS),
            ("rules:\n- treatment:\n    no", 3, "'no', which YAML takes for true or false", TREATMENTS),
            ("rules:\n- treatment:\n", 2, "no treatment", TREATMENTS),
            ("rules:\n- treatment: ''\n", 2, "no treatment", TREATMENTS),
            ("rules:\n- treatment: ~\n", 2, "'~', which YAML takes for nothing", TREATMENTS),
            ("rules:\n- treatment: [keep]", 2, "a list", "one treatment"),
            ("rules:\n- treatment: {a: b}", 2, "a mapping", "one treatment"),
            ("rules:\n- treatment: |\n    keep\n    this", 2, r"'keep\nthis'", TREATMENTS),
            (f"rules:\n- treatment: {'x' * 1000}", 2, "xxxx", TREATMENTS),
            ("rules:\n- treatment: keep\n  part: encoder", 3, "part 'encoder'", "one of decoder, outside, mtp, vision"),
            ("rules:\n- role: [norm,\n    5]\n  treatment: keep", 3, "role '5', which YAML takes for a number", "norm"),
            ("rules:\n- role: [norm, 1.5]\n  treatment: keep", 2, "'1.5', which YAML takes for a number", "norm"),
            ("rules:\n- role: 2026-01-01\n  treatment: keep", 2, "which YAML takes for a date", "norm"),
            ("rules:\n- role:\n  - norm\n  - [gate]\n  treatment: keep", 4, "a list", "a role, or a list"),
            ("rules:\n- role: {a: b}\n  treatment: keep", 2, "a mapping", "a role, or a list of them"),
            ("rules:\n- treatment: e4m3\n  scale: 1", 3, "scale '1', which YAML takes for a number", "amax, mse"),
            ("rules:\n- treatment: e4m3\n  scale: [mse]", 3, "a list", "one scale"),
            ("rules:\n- treatment: e4m3\n  scale:", 3, "no scale", "one of amax, mse"),
        ],
    )
    def test_not_a_recipe(self, tmp_path, text, line, found, expected):
        facts = not_a_recipe(tmp_path, text, line)
        assert found in facts["found"]
        assert expected in facts["expected"]

    @pytest.mark.parametrize("empty", ["[]", "", "null", "~"])
    @pytest.mark.parametrize("key", ["role", "part"])
    def test_a_rule_for_nothing_at_all(self, tmp_path, key, empty):
        """A list from which everything was struck out must not turn into a rule for everything."""
        facts = not_a_recipe(tmp_path, f"rules:\n- treatment: bf16\n  {key}: {empty}\n{KEEP}", 3)
        assert facts["found"] == f"a {key} that is empty"
        assert facts["remedy"] == f"leave {key} out to match every one"

    @pytest.mark.parametrize(
        ("line", "meant"),
        [
            ("role: attenton", "attention or linear_attention"),
            ("role: expert", "shared_expert or routed_experts"),
            ("role: [NORM]", "norm"),
            ("part: decoders", "decoder"),
            ("treatment: E4M3", "e4m3"),
            ("treatment: fp32", "f32"),
            ("scale: max", "amax"),
            ("roles: norm", "role"),
        ],
    )
    def test_what_was_meant(self, tmp_path, line, meant):
        others = {"treatment": "e4m3"} if not line.startswith("treatment") else {"part": "mtp"}
        text = "rules:\n" + "".join(f"- {key}: {value}\n" for key, value in others.items()) + f"  {line}\n{KEEP}"
        assert not_a_recipe(tmp_path, text, 3)["remedy"] == f"did you mean {meant}?"

    def test_rules_under_almost_that_name(self, tmp_path):
        assert not_a_recipe(tmp_path, f"rule:\n{KEEP}", 1)["remedy"] == "did you mean rules?"

    def test_nothing_is_suggested_for_what_is_like_nothing(self, tmp_path):
        assert "FORMAT.md" in not_a_recipe(tmp_path, "rules:\n- treatment: gptq", 2)["remedy"]

    @pytest.mark.parametrize("treatment", ["keep", "bf16", "f32", "drop"])
    def test_scale_beside_another_treatment(self, tmp_path, treatment):
        text = f"rules:\n- part: mtp\n  scale: mse\n  treatment: {treatment}\n{KEEP}"
        assert not_a_recipe(tmp_path, text, 3)["found"] == f"scale mse beside treatment {treatment}"

    @pytest.mark.parametrize(
        ("text", "line", "found"),
        [
            (f"rules:\n{KEEP}rules:\n{KEEP}", 3, "'rules' again; it stands in line 1"),
            ("rules:\n- treatment: keep\n  role: norm\n  treatment: f32", 4, "'treatment' again; it stands in line 2"),
            ("rules:\n- role: norm\n  treatment: keep\n\n  'role': gate", 5, "'role' again; it stands in line 2"),
            ("rules: [{part: mtp, part: mtp, treatment: keep}]", 1, "'part' again; it stands in line 1"),
        ],
    )
    def test_a_key_twice(self, tmp_path, text, line, found):
        assert found in not_a_recipe(tmp_path, text, line)["found"]

    @pytest.mark.parametrize(
        ("rules", "line", "before"),
        [
            (["treatment: keep", "{role: norm, treatment: f32}"], 3, 2),
            (["treatment: keep", "treatment: keep"], 3, 2),
            (["{role: lm_head, treatment: e4m3}", "treatment: keep", "{part: mtp, treatment: drop}"], 4, 3),
            (["{role: [norm, gate], treatment: f32}", "{role: gate, part: mtp, treatment: bf16}"], 3, 2),
            (["{part: mtp, treatment: drop}", "{role: norm, part: mtp, treatment: keep}", "treatment: keep"], 3, 2),
            (["{role: norm, treatment: f32}", "{role: norm, treatment: bf16}", "treatment: keep"], 3, 2),
        ],
    )
    def test_a_rule_that_is_never_reached(self, tmp_path, rules, line, before):
        facts = not_a_recipe(tmp_path, "rules:\n" + "".join(f"- {rule}\n" for rule in rules), line)
        assert f"rule {line - 1}, which never applies: the rule in line {before} " in facts["found"]
        assert f"above line {before}" in facts["remedy"]

    def test_a_rule_covered_by_two_together_is_let_be(self, tmp_path):
        file = tmp_path / "own.yaml"
        file.write_text(
            "rules:\n- {role: norm, treatment: f32}\n- {role: gate, treatment: f32}\n"
            f"- {{role: [norm, gate], treatment: bf16}}\n{KEEP}"
        )
        assert len(load_recipe(str(file)).rules) == 4


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "line", "found"),
        [
            ("rules: [{treatment: keep}", 1, "column 26: expected ',' or ']', but got '<stream end>'"),
            ("rules: [\n{treatment: keep}\n", 3, "while parsing a flow sequence from line 1"),
            ("rules: [{treatment: keep}]]", 1, "column 27: expected <block end>, but found ']'"),
            ("rules:\n- role: norm: gate\n  treatment: keep", 2, "column 13: mapping values are not allowed here"),
            ("rules:\n - treatment: keep\n  - treatment: keep", 3, "a block collection from line 2"),
            ("rules:\n- treatment: 'keep\n", 3, "while scanning a quoted scalar from line 2"),
            ("rules:\n- treatment: %x", 2, "column 14: found character '%'"),
            (f"%YAML 2.0\n---\nrules:\n{KEEP}", 1, "incompatible YAML document"),
            (f"%YAML 1.{'1' * 5000}\n---\nrules:\n{KEEP}", 1, "a number that nothing can hold"),
            ('rules:\n- treatment: "\\UFFFFFFFF"', 2, "a number that nothing can hold"),
            ("rules:\n- treatment: ke\x07ep", 2, "the character U+0007"),
            ("\r\nrules:\r- treatment: ke\x00ep", 3, "the character U+0000"),
            (f"rules:\n{KEEP}---\nrules:\n{KEEP}", 3, "a second document"),
            (f"rules:\n{KEEP}---\n", 3, "a second document"),
            (b"rules:\n\n- treatment: \xff", 3, "byte 0xFF"),
            ("rules:\n- treatment: für".encode("latin-1"), 2, "byte 0xFC"),
            (f"rules:\n{KEEP}".encode("utf-16"), 1, "byte 0xFF"),
        ],
    )
    def test_not_yaml(self, tmp_path, text, line, found):
        assert found in not_a_recipe(tmp_path, text, line)["found"]

    @pytest.mark.parametrize("text", ["rules:\n\t- treatment: keep", "rules:\n- role: norm\n\ttreatment: keep"])
    def test_tabs(self, tmp_path, text):
        facts = not_a_recipe(tmp_path, text, text[: text.index("\t")].count("\n") + 1)
        assert facts["found"] == r"column 1: found character '\t' that cannot start any token"
        assert facts["remedy"] == "indent with spaces, not tabs"

    @pytest.mark.parametrize(
        ("text", "line", "found"),
        [
            ("rules:\n- &rest\n  treatment: keep\n", 2, "anchor &rest"),
            (f"rules:\n{KEEP}- *rest", 3, "alias *rest"),
            ("&rules rules: *rules", 1, "anchor &rules"),
            ("rules: &rules [*rules]", 1, "anchor &rules"),
            ("rules:\n- treatment: &t keep", 2, "anchor &t"),
            ("rules:\n- <<: {treatment: keep}", 2, "'<<', which YAML takes for a merge key"),
            ("rules:\n- !!str treatment: keep", 2, "tag '!!str'"),
            ("rules:\n- treatment: ! keep", 2, "tag '!'"),
            ("rules: !<tag:x> []", 1, "tag 'tag:x'"),
            ("rules:\n- !!python/object/apply:os.system [exit]", 2, "tag '!!python/object/apply:os.system'"),
            ("%TAG ! tag:yaml.org,2002:python/\n---\n!name:os.system x", 3, "tag '!!python/name:os.system'"),
            ("rules:\n- !x!y z", 2, "found undefined tag handle '!x!'"),
        ],
    )
    def test_more_yaml_than_a_recipe_needs(self, tmp_path, text, line, found):
        assert found in not_a_recipe(tmp_path, text, line)["found"]

    def test_a_billion_laughs(self, tmp_path):
        lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
        assert not_a_recipe(tmp_path, "\n".join([*lines, "rules: *a39"]), 1)["found"] == "anchor &a0"

    @pytest.mark.parametrize(
        "text", ["rules:\n- " + "[" * 5000 + "]" * 5000, "rules:\n" + "- " * 5000, "rules:\n- " + "{a: " * 5000]
    )
    def test_deep_nesting(self, tmp_path, text):
        assert "levels" in not_a_recipe(tmp_path, text, 2)["found"]

    def test_a_file_that_is_no_recipe_by_its_size(self, tmp_path):
        """A shard given by mistake is not read whole; comments may fill a file up to the bound."""
        text = f"rules:\n{KEEP}#".ljust(65536, "x")
        assert "65,536 bytes" in not_a_recipe(tmp_path, text + "x", None)["found"]
        (tmp_path / "own.yaml").write_text(text)
        assert len(load_recipe(str(tmp_path / "own.yaml")).rules) == 1

    def test_a_sparse_file_of_a_terabyte(self, tmp_path):
        with (tmp_path / "own.yaml").open("wb") as stream:
            stream.truncate(1 << 40)
        with pytest.raises(InputError, match="more than 65,536 bytes"):
            load_recipe(str(tmp_path / "own.yaml"))


class TestFiles:
    @pytest.mark.parametrize("name", ["e5m2", "recipes/e4m3.yaml.bak", "", ".", "/dev/zero", "a\0b", "e4m3.yaml/x"])
    def test_no_such_recipe(self, bf16, name):
        with pytest.raises(InputError, match="no such recipe") as refusal:
            run(bf16, bf16.parent / "out", recipe=name)
        assert "experts-only" in refusal.value.facts["expected"]

    def test_a_name_too_long_for_a_file(self):
        with pytest.raises(InputError, match="cannot read the recipe") as refusal:
            load_recipe("x" * 5000)
        names_everything(refusal.value, "name too long")

    def test_a_file_that_may_not_be_read(self, tmp_path, monkeypatch):
        """By way of open: whoever runs these tests as root may read everything."""
        file = tmp_path / "own.yaml"
        file.write_text(f"rules:\n{KEEP}")

        def refuse(path, *_):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(type(file), "open", refuse)
        with pytest.raises(InputError, match="cannot read the recipe") as refusal:
            load_recipe(str(file))
        names_everything(refusal.value, "Permission denied", str(file))


class TestApplied:
    """A recipe may be sound and still not be one for this checkpoint."""

    def refused(self, folder, text, line, *facts):
        file = folder.parent / "own.yaml"
        file.write_text(text)
        error = refused(folder, *facts, recipe=str(file))
        assert error.facts["file"] == f"{file}:{line}"
        assert "tensor" in error.facts
        return error

    @pytest.mark.parametrize("role", ["router", "embedding", "norm", "gate", "convolution", "vision", "mtp_projection"])
    def test_e4m3_for_what_engines_build_unquantised(self, bf16, role):
        text = f"rules:\n- role: lm_head\n  treatment: e4m3\n- treatment: e4m3\n  role: {role}\n{KEEP}"
        self.refused(bf16, text, 4, f"e4m3 for role {role}", "routed_experts")

    @pytest.mark.parametrize("rule", ["part: decoder", "part: outside", "role: norm", "role: lm_head"])
    def test_drop_of_what_the_model_needs(self, bf16, rule):
        self.refused(bf16, f"rules:\n\n- {{{rule}, treatment: drop}}\n{KEEP}", 3, "drop in part")

    def test_half_of_a_part_dropped(self, bf16):
        """Every vision tensor has the role vision, so only MTP can be halved by a recipe."""
        file = bf16.parent / "own.yaml"
        file.write_text("rules: [{part: mtp, role: norm, treatment: drop}, {treatment: keep}]")
        error = refused(bf16, str(file), "part mtp", "7 of 29", recipe=str(file))
        assert "half" in error.problem

    def test_no_rule_for_everything(self, bf16):
        """The line of the last rule, below which one is missing."""
        text = "rules:\n- role: lm_head\n  treatment: e4m3\n- role: routed_experts\n  treatment: e4m3\n"
        error = self.refused(bf16, text, 4, "- treatment: keep")
        assert error.facts["found"].startswith("no rule for role ")

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


class TestProgram:
    @pytest.mark.parametrize(
        ("content", "line", "shown"),
        [
            (b"rules:\n- role: expert\n  treatment: keep", 2, "did you mean"),
            (b"rules:\n- treatment: keep\n  treatment: drop", 3, "again"),
            (b"rules: [", 1, "expected"),
            (b"rules: !!python/object/apply:os.system [touch pwned]", 1, "tag"),
            (b"rules:\n- treatment: \xff", 2, "UTF-8"),
            (b'rules:\n- treatment: "\\uD800"', 2, r"\ud800"),
            (b"rules:\n- role: norm\n  treatment: e4m3\n- treatment: keep", 2, "tensor:"),
        ],
    )
    def test_exit_code_2_and_no_traceback(self, bf16, content, line, shown):
        file, out = bf16.parent / "own.yaml", bf16.parent / "out"
        file.write_bytes(content)
        done = convert_program(bf16, out, "--recipe", file)
        assert done.returncode == 2
        assert f"{file}:{line}\n" in done.stderr
        assert shown in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert not out.exists()
