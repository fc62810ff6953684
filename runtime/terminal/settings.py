"""What can be set for the answers to come, by name: how to sample, how long, whether to think. Holds no text."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from mosaic.format.errors import InputError
from mosaic.runtime.sampling import Sampling

AS_THE_MODEL = "default"  # typed for a value: take back what was set
SAMPLING = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class Kind:
    """Values of a setting: how they are read, and what a person is told they are."""

    read: Callable[[str], Any]  # ValueError for what is none
    expected: str
    least: int | None = None


def read_biases(text: str) -> dict[int, float]:
    """Biases as they are typed: TOKEN=BIAS, divided by spaces. ValueError for anything else."""
    return {int(token): float(bias) for token, bias in (item.split("=") for item in text.split())}


def _read_switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


_NUMBER, _WHOLE = Kind(float, "a number"), Kind(int, "a whole number")
KINDS = dict.fromkeys(SAMPLING, _NUMBER) | {
    "top_k": _WHOLE,
    "logit_bias": Kind(read_biases, "token ids with a bias each, as 11=-5 13=-inf"),
    "max_tokens": Kind(int, "a whole number >= 1", 1),
    "seed": Kind(int, "a whole number >= 0", 0),
    "thinking": Kind(_read_switch, "on or off"),
}


class Settings:
    """`changed` has the values that were set, by name; all others are the model's, `defaults`."""

    def __init__(self, defaults: Sampling | None = None) -> None:
        self.defaults = defaults or Sampling()
        self.changed: dict[str, Any] = {}

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of Sampling that differ from the model's."""
        return {name: value for name, value in self.changed.items() if name in SAMPLING}

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of an answer."""
        return self.changed.get("max_tokens")

    @property
    def seed(self) -> int | None:
        """Of the sampler."""
        return self.changed.get("seed")

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to think; None: as its template has it."""
        return self.changed.get("thinking")

    def put(self, name: str, value: Any) -> None:
        """Set a value of the right type; InputError if it is out of range."""
        least = KINDS[name].least
        if name in SAMPLING:
            replace(self.defaults, **{name: value})
        elif least is not None and value < least:
            raise _unusable(name, value)
        self.changed[name] = value

    def set(self, name: str, text: str) -> None:
        """Set what was typed, or take it back (`default`). InputError for what is no value of this setting."""
        if text == AS_THE_MODEL:
            self.changed.pop(name, None)
            return
        try:
            value = KINDS[name].read(text)
        except (ValueError, KeyError) as error:
            raise _unusable(name, text) from error
        self.put(name, value)

    def shown(self, name: str) -> str:
        """The value in force, as it is typed."""
        value = self.changed.get(name, getattr(self.defaults, name, None))
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, Mapping):
            return " ".join(f"{token}={bias:g}" for token, bias in value.items()) or "none"
        return AS_THE_MODEL if value is None else str(value)

    def as_dict(self) -> dict[str, Any]:
        """What was set, for a JSON file: numbers, and everything else as it is typed."""
        return {
            name: value if type(value) in (int, float) else self.shown(name) for name, value in self.changed.items()
        }

    def updated(self, values: Mapping[str, Any]) -> "Settings":
        """A copy in which `values`, as `as_dict` gives them, are set and nothing else. InputError if they cannot be."""
        made = Settings(self.defaults)
        for name, value in values.items():
            if name not in KINDS or type(value) not in (int, float, str):
                expected, remedy = ", ".join(KINDS), "take it out of the file"
                raise InputError("not a setting", found=f"{name}: {value!r}", expected=expected, remedy=remedy)
            made.set(name, str(value))
        return made


@contextmanager
def named(name: str, shown: str) -> Iterator[None]:
    """Errors about the setting `name` speak of it as `shown`: as the user typed it."""
    try:
        yield
    except InputError as error:
        facts: dict[str, Any] = {fact: text.replace(name, shown) for fact, text in error.facts.items()}
        raise InputError(error.problem.replace(name, shown), **facts) from error


def _unusable(name: str, found: object) -> InputError:
    return InputError(f"{name} is not usable", found=found, expected=KINDS[name].expected, remedy=f"change {name}")
