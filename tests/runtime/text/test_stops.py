"""Stop strings, wherever the text is divided; the search itself has its own tests."""

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.text.stops import StopStrings

#: Stop strings, text, and what comes before the stop; None: no stop.
CASES = [
    ([], "anything", None),
    (["END"], "one END two END", "one "),
    (["END"], "EN D", None),
    (["aab"], "aaab", "a"),  # the beginning of the stop string is not where it seems first
    (["abab", "bb"], "abaabb", "abaa"),
    (["ab", "abc"], "xabc", "x"),  # a beginning of another one: complete first
    (["abc", "bc"], "xabc", "x"),  # complete at once: the longest
    (["abcd", "bc"], "xabcd", "xa"),
    (["\n\n"], "a\n\n\nb", "a"),
    (["界！"], "你好，世界！", "你好，世"),
    (["👩‍👧"], "👨‍👩‍👧‍👦", "👨‍"),
    (["🇪🇺"], "🇩🇪🇺🇸", "🇩"),  # by code point, as in every API: flags are pairs of letters
    (["\u0301"], "e\u0301", "e"),
]


@pytest.mark.parametrize(("stop", "text", "before"), CASES, ids=str)
def test_a_text_ends_before_the_first_stop_string(stop, text, before):
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            stops = StopStrings(stop)
            out = "".join(map(stops.push, (text[:first], text[first:second], text[second:])))
            assert stops.stopped is (before is not None)
            if stops.stopped:
                assert (stops.push("more"), stops.finish()) == ("", "")
            assert out + stops.finish() == (text if before is None else before)


def test_only_a_true_beginning_is_held():
    stops = StopStrings(["<|end|>", "Human:"])
    assert [stops.push(text) for text in ("He said <", "| H", "umam", ": <|end|", "?")] == [
        "He said ",
        "<| ",
        "Humam",
        ": ",
        "<|end|?",
    ]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["x", ""])
