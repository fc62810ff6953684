"""Recipes: ordered rules that say how each role is stored; the first rule that matches wins."""

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from mosaic.convert.recipe_file import RecipeError, WrittenRule, read_rules
from mosaic.format.errors import InputError
from mosaic.format.tensors import QUANTIZABLE, Part, Role, TensorSpec
from mosaic.recipes import FOLDER


class Treatment(StrEnum):
    """How a tensor is stored."""

    E4M3 = "e4m3"
    KEEP = "keep"  # byte for byte as in the source
    BF16 = "bf16"
    F32 = "f32"
    DROP = "drop"  # whole optional parts only: vision, mtp


class ScaleRule(StrEnum):
    """How the scale of a block is found; docs/FORMAT.md section 3."""

    AMAX = "amax"
    MSE = "mse"


@dataclass(frozen=True)
class Rule:
    """Applies to the given roles and parts; empty means every one."""

    treatment: Treatment
    roles: frozenset[Role]
    parts: frozenset[Part]
    scale: ScaleRule | None = None  # e4m3 only; None: what the recipe was loaded with
    line: int = field(default=0, compare=False)

    def matches(self, tensor: TensorSpec) -> bool:
        """Whether this rule speaks of the tensor."""
        return (not self.roles or tensor.role in self.roles) and (not self.parts or tensor.part in self.parts)

    def covers(self, other: "Rule") -> bool:
        """Whether this rule matches whatever the other one does."""
        roles, parts = self.roles or frozenset(Role), self.parts or frozenset(Part)
        return roles.issuperset(other.roles or Role) and parts.issuperset(other.parts or Part)


@dataclass(frozen=True)
class Recipe:
    """A named list of rules. `digest` identifies what they do, not the comments around them."""

    name: str
    file: Path
    rules: tuple[Rule, ...]
    scale: ScaleRule = ScaleRule.AMAX  # of the e4m3 rules that name none

    @property
    def digest(self) -> str:
        """sha256 of the rules. Scale rules count where they are not amax, the only one there once was."""
        rules = [
            [rule.treatment, sorted(rule.roles), sorted(rule.parts), *self._other_scale(rule)] for rule in self.rules
        ]
        return hashlib.sha256(json.dumps(rules).encode()).hexdigest()

    def treatment(self, tensor: TensorSpec) -> Treatment:
        """What the first matching rule says, held against what the format allows."""
        rule = self.rule(tensor)
        if rule.treatment is Treatment.E4M3 and tensor.role not in QUANTIZABLE:
            expected = f"e4m3 for {', '.join(sorted(QUANTIZABLE))} only"
            raise self._refused(tensor, rule, f"e4m3 for role {tensor.role}", expected, "keep this role")
        if rule.treatment is Treatment.DROP and tensor.part not in (Part.VISION, Part.MTP):
            found = f"drop in part {tensor.part}"
            raise self._refused(tensor, rule, found, "drop of part vision or mtp", "keep this tensor")
        return rule.treatment

    def scale_rule(self, tensor: TensorSpec) -> ScaleRule:
        """How the scales of a tensor are found if it is quantised; codes and scales of FP8 sources pass through."""
        return self.rule(tensor).scale or self.scale

    def rule(self, tensor: TensorSpec) -> Rule:
        """The first rule that matches."""
        for rule in self.rules:
            if rule.matches(tensor):
                return rule
        found = f"no rule for role {tensor.role} in part {tensor.part}; the last rule is in this line"
        remedy = "end the recipe with `- treatment: keep`"
        raise self._refused(tensor, self.rules[-1], found, "a rule for every tensor", remedy)

    def place(self, rule: Rule) -> str:
        """File and line of a rule."""
        return f"{self.file}:{rule.line}"

    def _other_scale(self, rule: Rule) -> list[ScaleRule]:
        scale = rule.scale or self.scale
        return [scale] if rule.treatment is Treatment.E4M3 and scale is not ScaleRule.AMAX else []

    def _refused(self, tensor: TensorSpec, rule: Rule, found: str, expected: str, remedy: str) -> InputError:
        return InputError(
            f"recipe {self.name} cannot be applied",
            file=self.place(rule),
            tensor=tensor.name,
            found=found,
            expected=expected,
            remedy=remedy,
        )


def load_recipe(name: str, scale: ScaleRule = ScaleRule.AMAX) -> Recipe:
    """A shipped recipe by its name, or a YAML file by its path. Rules that name no scale rule take `scale`."""
    shipped = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    file = FOLDER / f"{name}.yaml" if name in shipped else Path(name)
    try:
        if not file.is_file():
            raise InputError(
                "no such recipe",
                found=name,
                expected=f"one of {', '.join(shipped)}, or the path of a YAML file",
                remedy="choose one, or write one (docs/FORMAT.md, section 6)",
            )
        rules = tuple(_rule(written) for written in read_rules(file))
        _check_reached(rules)
    except OSError as error:
        raise InputError(
            "cannot read the recipe",
            file=f"{name:.200}",
            found=error.strerror,
            expected="a YAML file",
            remedy="check the path and its rights",
        ) from error
    except RecipeError as error:
        raise InputError(
            "not a recipe",
            file=f"{file}:{error.line}" if error.line else file,
            found=error.found,
            expected=error.expected,
            remedy=error.remedy,
        ) from error
    return Recipe(file.stem, file, rules, scale)


def _rule(written: WrittenRule) -> Rule:
    words = written.words
    treatment = words["treatment"][0].among(Treatment, "treatment")
    roles = frozenset(word.among(Role, "role") for word in words.get("role", ()))
    parts = frozenset(word.among(Part, "part") for word in words.get("part", ()))
    scale = words["scale"][0].among(ScaleRule, "scale") if "scale" in words else None
    if scale and treatment is not Treatment.E4M3:
        found = f"scale {scale} beside treatment {treatment}"
        raise RecipeError(words["scale"][0].line, found, "scale beside treatment e4m3 only", "remove `scale:`")
    return Rule(treatment, roles, parts, scale, written.line)


def _check_reached(rules: tuple[Rule, ...]) -> None:
    """A rule that an earlier one leaves nothing to is a mistake: what it says was meant."""
    for number, rule in enumerate(rules):
        if before := next((earlier for earlier in rules[:number] if earlier.covers(rule)), None):
            found = f"rule {number + 1}, which never applies: the rule in line {before.line} matches all that it does"
            expected = "rules from the particular to the general: the first that matches wins"
            raise RecipeError(rule.line, found, expected, f"move it above line {before.line}, or remove it")
