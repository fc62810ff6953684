"""What the text of an argument stands for: JSON without its loopholes, and values typed by a tool's JSON schema."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import unique_keys

_TYPE_NAMES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_NULLS = ("null", "None")
_BOOLEANS = {"true": True, "false": False}


def parse_json(text: str) -> Any:
    """A JSON value; ValueError for anything else, also NaN, 1e999, a key that stands twice, or nesting without end."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} cannot be kept")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_constant(digits)


def functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of the parameters of every function offered, by name; InputError for what is not a tool."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        schema = function.get("parameters") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or not isinstance(schema, Mapping | None):
            raise InputError(
                "not a tool",
                found=str(tool)[:200],
                expected='{"type": "function", "function": {"name": ..., "parameters": a JSON schema}}',
                remedy="write tools as the API has them",
            )
        schemas[name] = schema or {}
    return schemas


def parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of each parameter, by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of an argument that was written without quotes.

    It is the text itself, unless the schema (references are looked up in `root`) leaves strings out and the text is a
    value of a type it names. Booleans and null may be written as in Python: templates do so.
    """
    types = types_of(schema, root)
    word = text.strip()
    if "null" in types and word in _NULLS:
        return None
    if not types or "string" in types:
        return text
    if "boolean" in types and word.lower() in _BOOLEANS:
        return _BOOLEANS[word.lower()]
    try:
        value = parse_json(word)
    except ValueError:
        return text
    found = _TYPE_NAMES[type(value)]
    fits = found in types or (found in ("integer", "number") and bool(types & {"integer", "number"}))
    return value if fits else text


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types a schema speaks of, in any of its alternatives; empty where it does not say."""
    types: set[str] = set()
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        if "type" in part:
            types.update(name for name in _as_list(part["type"]) if isinstance(name, str))
            continue
        values = [*_as_list(part.get("enum", [])), *([part["const"]] if "const" in part else [])]
        types.update(_TYPE_NAMES[type(value)] for value in values)
        waiting += [way for word in ("anyOf", "oneOf", "allOf") for way in _as_list(part.get(word, []))]
        waiting.append(_referred(part.get("$ref"), root))
    return types


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """What "#/$defs/Name" stands for; None for what cannot be found."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: Any = root
    for key in reference[2:].split("/"):
        target = target.get(key) if isinstance(target, Mapping) else None
    return target
