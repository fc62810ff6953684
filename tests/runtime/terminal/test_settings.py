"""Settings by name: what can be typed, what is refused and in whose words, what a file keeps."""

import json
import math

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.terminal.settings import KINDS, Settings, named

MODEL = Sampling(temperature=0.7, top_k=20)


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("temperature", "0.6", 0.6),
        ("temperature", "0", 0.0),
        ("top_k", "40", 40),
        ("top_p", ".9", 0.9),
        ("min_p", "0.05", 0.05),
        ("repetition_penalty", "1.1", 1.1),
        ("presence_penalty", "-1.5", -1.5),
        ("frequency_penalty", "0.5", 0.5),
        ("logit_bias", "11=-5 13=-inf", {11: -5.0, 13: -math.inf}),
        ("max_tokens", "12", 12),
        ("seed", "0", 0),
        ("thinking", "off", False),
    ],
)
def test_what_is_typed_is_set_shown_and_kept(name, typed, value):
    settings = Settings(MODEL)
    settings.set(name, typed)
    assert settings.changed == {name: value}
    again = settings.updated(json.loads(json.dumps(settings.as_dict())))
    assert again.changed == {name: value}
    shown = Settings(MODEL)
    shown.set(name, settings.shown(name))
    assert shown.changed == {name: value}


def test_every_field_of_sampling_can_be_set_and_every_setting_has_a_default():
    settings = Settings(MODEL)
    assert set(Sampling.__dataclass_fields__) < set(KINDS)
    shown = {name: settings.shown(name) for name in KINDS}
    assert (shown["temperature"], shown["top_k"], shown["logit_bias"], shown["seed"]) == (
        "0.7",
        "20",
        "none",
        "default",
    )


def test_default_takes_back():
    settings = Settings(MODEL)
    settings.set("top_k", "3")
    settings.set("thinking", "on")
    assert (settings.sampling, settings.thinking) == ({"top_k": 3}, True)
    settings.set("top_k", "default")
    settings.set("thinking", "default")
    assert settings.changed == {}
    assert (settings.max_tokens, settings.seed, settings.thinking) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("temperature", "hot"),
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("top_k", "1.5"),
        ("top_k", "-2"),
        ("top_p", "0"),
        ("min_p", "1.5"),
        ("repetition_penalty", "0"),
        ("logit_bias", "11"),
        ("logit_bias", "a=1"),
        ("logit_bias", "11=nan"),
        ("max_tokens", "0"),
        ("seed", "-1"),
        ("thinking", "maybe"),
    ],
)
def test_what_is_no_value_is_refused_and_changes_nothing(name, typed):
    settings = Settings(MODEL)
    with pytest.raises(InputError, match=name) as caught:
        settings.set(name, typed)
    assert "remedy" in caught.value.facts
    assert settings.changed == {}


@pytest.mark.parametrize("values", [{"colour": 1}, {"top_k": True}, {"top_k": None}, {"top_p": [1]}, {"seed": "x"}])
def test_files_with_other_settings_are_refused(values):
    with pytest.raises(InputError):
        Settings(MODEL).updated(values)


def test_errors_speak_the_words_of_the_command_line():
    with pytest.raises(InputError) as caught, named("top_p", "--top-p"):
        Settings().put("top_p", 0.0)
    assert "top_p" not in str(caught.value)
    assert caught.value.problem.startswith("--top-p")
    assert caught.value.facts["remedy"] == "change --top-p"
