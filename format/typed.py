"""JSON values into dataclasses, by their annotations: whatever is missing, unknown or of the wrong type is refused."""

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")


def typed(kind: type[T], value: object, where: str) -> T:
    """`value` as a `kind`, a dataclass; ValueError naming the place, which begins with `where`.

    Fields may be dataclasses, tuples of one type, `X | None`, StrEnums and plain values.
    """
    return typing.cast(T, _parse(kind, value, where))


def _parse(kind: Any, value: object, where: str) -> object:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            found = sorted(value) if isinstance(value, dict) else value
            raise ValueError(f"{where}: found {found}, expected an object with the keys {sorted(hints)}")
        return kind(**{name: _parse(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        item = typing.get_args(kind)[0]
        return tuple(_parse(item, entry, f"{where}[{position}]") for position, entry in enumerate(value))
    if typing.get_origin(kind) is types.UnionType:  # "X | None"
        chosen = next(option for option in typing.get_args(kind) if option is not types.NoneType)
        return None if value is None else _parse(chosen, value, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where}: found {value!r}, expected {kind}")
    return value
