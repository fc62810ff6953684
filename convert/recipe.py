"""Recipes: ordered rules that say how each role is stored; the first rule that matches wins."""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

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


@dataclass(frozen=True)
class Rule:
    """Applies to the given roles and parts; empty means every one."""

    treatment: Treatment
    roles: frozenset[Role]
    parts: frozenset[Part]

    def matches(self, tensor: TensorSpec) -> bool:
        """Whether this rule speaks of the tensor."""
        return (not self.roles or tensor.role in self.roles) and (not self.parts or tensor.part in self.parts)


@dataclass(frozen=True)
class Recipe:
    """A named list of rules. `digest` identifies the rules, not the comments around them."""

    name: str
    file: Path
    rules: tuple[Rule, ...]

    @property
    def digest(self) -> str:
        """sha256 of the rules."""
        rules = [[rule.treatment, sorted(rule.roles), sorted(rule.parts)] for rule in self.rules]
        return hashlib.sha256(json.dumps(rules).encode()).hexdigest()

    def treatment(self, tensor: TensorSpec) -> Treatment:
        """What the first matching rule says, held against what the format allows."""
        rule = next((rule for rule in self.rules if rule.matches(tensor)), None)
        if rule is None:
            raise self._refused(tensor, "no rule", "a rule for every tensor", "end the recipe with `- treatment: keep`")
        if rule.treatment is Treatment.E4M3 and tensor.role not in QUANTIZABLE:
            expected = f"e4m3 for {', '.join(sorted(QUANTIZABLE))} only"
            raise self._refused(tensor, f"e4m3 for role {tensor.role}", expected, "keep this role")
        if rule.treatment is Treatment.DROP and tensor.part not in (Part.VISION, Part.MTP):
            raise self._refused(tensor, f"drop in part {tensor.part}", "drop of part vision or mtp", "keep this tensor")
        return rule.treatment

    def _refused(self, tensor: TensorSpec, found: str, expected: str, remedy: str) -> InputError:
        return InputError(
            f"recipe {self.name} cannot be applied",
            file=self.file,
            tensor=tensor.name,
            found=found,
            expected=expected,
            remedy=remedy,
        )


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by its name, or a YAML file by its path."""
    shipped = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    file = FOLDER / f"{name}.yaml" if name in shipped else Path(name)
    if not file.is_file():
        raise InputError(
            "no such recipe",
            found=name,
            expected=f"one of {', '.join(shipped)}, or the path of a YAML file",
            remedy="choose one, or write one (docs/FORMAT.md, section 6)",
        )
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
        return Recipe(file.stem, file, _rules(value))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(
            "not a recipe",
            file=file,
            found=error,
            expected="`rules:`, a list of {role, part, treatment}",
            remedy="see docs/FORMAT.md, section 6",
        ) from error


def _rules(value: Any) -> tuple[Rule, ...]:
    if not isinstance(value, dict) or set(value) != {"rules"} or not isinstance(value["rules"], list):
        raise ValueError(f"{value!r:.60}")
    return tuple(_rule(number, entry) for number, entry in enumerate(value["rules"], 1))


def _rule(number: int, entry: Any) -> Rule:
    if not isinstance(entry, dict) or "treatment" not in entry or not set(entry) <= {"role", "part", "treatment"}:
        raise ValueError(f"rule {number}: {entry!r:.60}")

    def several(kind: type[Role] | type[Part], value: Any) -> frozenset[Any]:
        values = value if isinstance(value, list) else [] if value is None else [value]
        if value == []:
            raise ValueError("an empty list matches nothing; leave the key out to match everything")
        return frozenset(kind(name) for name in values)

    try:
        roles, parts = several(Role, entry.get("role")), several(Part, entry.get("part"))
        return Rule(Treatment(entry["treatment"]), roles, parts)
    except ValueError as error:
        raise ValueError(f"rule {number}: {error}") from error
