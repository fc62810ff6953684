"""The incremental search held against one that has the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from mosaic.runtime.text.search import Search, TagSearch

#: Few letters, so that beginnings, ends and repetitions of the strings meet all the time.
STRINGS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4, unique=True)
TEXT = st.text("ab", max_size=40)
PIECES = st.lists(st.text("ab", max_size=4), max_size=12)


def first(strings, text):
    """Where the first string begins and ends: the earliest end, then the earliest beginning."""
    ends = [(end, end - len(s), s) for s in strings for end in range(len(text) + 1) if text[:end].endswith(s)]
    return min(ends, default=None)


def longest_beginning(strings, text):
    """The longest end of the text that a string may still begin with."""
    return max(
        (n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in strings)), default=0
    )


@given(STRINGS, PIECES)
def test_what_is_found_and_what_is_held_after_every_piece(strings, pieces):
    search, seen, released = Search(strings), "", ""
    for piece in pieces:
        before, found, after = search.push(piece)
        seen += piece
        released += before
        expected = first(strings, seen)
        if expected is None:
            assert (found, after) == (None, "")
            assert len(seen) - len(released) == longest_beginning(strings, seen)
            assert seen.startswith(released)
            continue
        end, start, string = expected
        assert (released, found, after) == (seen[:start], string, seen[end:])
        assert search.finish() == ""
        break
    else:
        assert released + search.finish() == seen
        assert search.finish() == ""


@given(STRINGS, TEXT, st.data())
def test_after_a_find_the_search_starts_afresh(strings, text, data):
    search, expected = Search(strings), []
    rest = text
    while (found := first(strings, rest)) is not None:
        end, start, string = found
        expected += [rest[:start], string]
        rest = rest[end:]
    expected.append(rest)
    seen, current = [], ""
    while text:
        cut = data.draw(st.integers(1, len(text)))
        piece, text = text[:cut], text[cut:]
        while True:
            before, string, piece = search.push(piece)
            current += before
            if string is None:
                break
            seen += [current, string]
            current = ""
    assert [*seen, current + search.finish()] == expected


NEAR_TAGS = st.lists(st.sampled_from(["\n", "\n\n", "x", "<", "t", ">", "<t>", "<t", "<<t>", " "]), max_size=12)


@given(NEAR_TAGS, st.booleans())
def test_newlines_before_a_tag_are_its_own(parts, after_tag):
    text = "".join(parts)
    head, tag, tail = text.partition("<t>")
    search, before, found = TagSearch("<t>", after_tag=after_tag), "", None
    for number, part in enumerate(parts):
        piece, found, after = search.push(part)
        before += piece
        if found is not None:
            rest = after + "".join(parts[number + 1 :])
            break
    body = head.lstrip("\n") if after_tag else head
    if tag:
        assert rest == tail
        assert before == body.rstrip("\n")
        assert found == body[len(before) :] + "<t>"
    else:
        assert found is None
        assert before + search.finish() == body


@given(NEAR_TAGS)
def test_only_newlines_and_beginnings_of_the_tag_are_held(parts):
    search, seen, released = TagSearch("<t>"), "", ""
    for part in parts:
        before, found, _ = search.push(part)
        seen, released = seen + part, released + before
        if found is not None:
            return
        certain = seen[: len(seen) - longest_beginning(["<t>"], seen)].rstrip("\n")
        assert released == certain
