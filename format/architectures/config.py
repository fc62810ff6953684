"""Reads fields of a config.json with errors that name the file, the key, what was found and what was expected."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError

_REMEDY = "download config.json again, or use a checkpoint Mosaic supports"


class Config:
    """One object of a config.json. `prefix` is its path in the file, for messages."""

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self._values = values
        self._file = file
        self._prefix = prefix

    def section(self, key: str) -> "Config":
        """The object under `key`."""
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return Config(value, self._file, f"{self._prefix}{key}.")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """A whole number from `minimum` to `maximum`."""
        value = self._values.get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(key, value, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise self.error(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers >= 0; absent means empty."""
        value = self._values.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or any(type(entry) is not int or entry < 0 for entry in value):
            raise self.error(key, value, "a list of whole numbers")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._values.get(key)
        if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
            raise self.error(key, value, "a list of strings")
        return value

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a field, if present, whose value is none of `allowed`: Mosaic would compute something else."""
        if key in self._values and self._values[key] not in allowed:
            raise self.error(key, self._values[key], " or ".join(repr(value) for value in allowed))

    def check(self, holds: bool, key: str, expected: str) -> None:
        """Refuse the value of `key` unless `holds`."""
        if not holds:
            raise self.error(key, self._values.get(key), expected)

    def error(self, key: str, found: object, expected: str) -> InputError:
        """The refusal of one field."""
        shown = "nothing" if found is None else repr(found)
        return InputError(
            f"config.json: {self._prefix}{key} is not usable",
            file=self._file,
            found=shown,
            expected=expected,
            remedy=_REMEDY,
        )
