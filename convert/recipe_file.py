"""Recipe files: YAML read with suspicion, every word with its line. What the words mean is `recipe`'s matter.

A recipe is mappings, lists and words. What else YAML can do is refused, since it could only surprise: anchors and
aliases, tags, several documents, a key that stands twice (the last would win), and words that are none (`no`, `null`).
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import yaml

KEYS = ("role", "part", "treatment", "scale")
LISTS = ("role", "part")  # these take one word or a list of them
RULE = f"{{{', '.join(KEYS)}}}"
MAX_BYTES = 64 << 10  # a rule for every role and part takes a tenth of this
MAX_DEPTH = 10  # a recipe has five: the file, its rules, a rule, its roles, a role
MANUAL = "see docs/FORMAT.md, section 6"

_KINDS = {
    "bool": "true or false",
    "float": "a number",
    "int": "a number",
    "merge": "a merge key",
    "null": "nothing",
    "timestamp": "a date",
}
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as YAML counts lines

Name = TypeVar("Name", bound=StrEnum)


class RecipeError(Exception):
    """What is wrong with a recipe file and in which line; `recipe` makes an InputError of it."""

    def __init__(self, line: int | None, found: str, expected: str, remedy: str = MANUAL) -> None:
        super().__init__(found)
        self.line, self.found, self.expected, self.remedy = line, found, expected, remedy


@dataclass(frozen=True, slots=True)
class Word:
    """A scalar, the line it stands in, and what YAML takes it for if not for text."""

    text: str
    line: int
    taken_for: str | None = None

    def among(self, names: type[Name], kind: str) -> Name:
        """The name it stands for."""
        return names(known(self, [*names], kind))


@dataclass(frozen=True, slots=True)
class WrittenRule:
    """A rule as it is written: `words` has the keys that are there, each with one word or more."""

    line: int
    words: dict[str, tuple[Word, ...]]


def known(word: Word, names: list[str], kind: str) -> str:
    """The text of a word that is one of the names."""
    if word.text not in names:
        close = get_close_matches(word.text.lower(), names, n=2)
        remedy = f"did you mean {' or '.join(close)}?" if close else MANUAL
        found = f"{kind} {word.text!r:.60}" if word.text else f"no {kind}"
        if word.text and word.taken_for:
            found += f", which YAML takes for {word.taken_for}"
        raise RecipeError(word.line, found, f"{'one of ' if len(names) > 1 else ''}{', '.join(names)}", remedy)
    return word.text


def read_rules(file: Path) -> list[WrittenRule]:
    """The rules of a file, at least one; RecipeError for everything that is not written as a recipe is."""
    root = _compose(_text(file))
    expected = "`rules:` and below it a list of rules"
    table = _mapping(root, ["rules"], expected)
    if "rules" not in table:
        raise RecipeError(_line(root), "a mapping without `rules`", expected)
    rules = table["rules"]
    if not isinstance(rules, yaml.SequenceNode):
        raise RecipeError(_line(rules), f"{_shown(rules)} as `rules`", f"a list of rules {RULE}")
    if not rules.value:
        remedy = "end the recipe with `- treatment: keep`"
        raise RecipeError(_line(rules), "an empty list of rules", "a rule for every tensor", remedy)
    return [_rule(node) for node in rules.value]


def _text(file: Path) -> str:
    with file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RecipeError(None, f"more than {MAX_BYTES:,} bytes", "a recipe: a few lines", "give the path of a recipe")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = _line_at(data[: error.start].decode("utf-8"))
        raise RecipeError(line, f"byte 0x{data[error.start]:02X}", "UTF-8 text", "save the file as UTF-8") from error


def _compose(text: str) -> yaml.Node:
    """The only document of a file as nodes; nothing is constructed from them."""
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_node() if loader.check_node() else None
        if root is None:
            raise RecipeError(1, "nothing", "`rules:` and below it a list of rules")
        if loader.check_node():
            line = loader.current_event.start_mark.line + 1
            raise RecipeError(line, "a second document", "one recipe in a file", "remove the line `---` and all below")
        return root
    except yaml.MarkedYAMLError as error:
        raise _syntax(error) from error
    except yaml.reader.ReaderError as error:
        line = _line_at(text[: error.position])
        raise RecipeError(line, f"the character U+{error.character:04X}", "text", "remove it") from error
    except (ValueError, OverflowError) as error:  # numbers in escapes and directives that PyYAML does not check
        line = loader.line + 1 if loader else 1
        raise RecipeError(line, "a number that nothing can hold", "YAML", "mend this line") from error


class _Loader(yaml.SafeLoader):
    """Refuses each thing a recipe has no use for when it comes up, before it can grow."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        event = self.current_event  # which check_event has made the next one
        line = event.start_mark.line + 1
        if event.anchor is not None:
            found = f"{'alias *' if alias else 'anchor &'}{event.anchor:.60}"
            raise RecipeError(line, found, "no anchors and aliases", "write out what it stands for")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!", 1)
            raise RecipeError(line, f"tag {tag!r:.60}", "no tags", "remove it")
        if self.depth == MAX_DEPTH:
            raise RecipeError(line, f"more than {MAX_DEPTH} levels of nesting", f"a list of rules {RULE}")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _rule(node: yaml.Node) -> WrittenRule:
    table = _mapping(node, [*KEYS], f"a rule {RULE}")
    if "treatment" not in table:
        raise RecipeError(_line(node), "a rule without treatment", f"a rule {RULE}", "add `treatment:` to it")
    return WrittenRule(_line(node), {key: _words(key, value) for key, value in table.items()})


def _mapping(node: yaml.Node, keys: list[str], expected: str) -> dict[str, yaml.Node]:
    """A mapping of some of these keys, each once."""
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(_line(node), _shown(node), expected)
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = known(_word(key, expected), keys, "key"), _line(key)
        if name in lines:
            found = f"key {name!r} again; it stands in line {lines[name]} already"
            raise RecipeError(line, found, "every key once", "remove one of the two, or begin a new rule with `-`")
        lines[name] = line
    return dict(zip(lines, (value for _, value in node.value), strict=True))


def _words(key: str, node: yaml.Node) -> tuple[Word, ...]:
    if key not in LISTS:
        return (_word(node, f"one {key}"),)
    words = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not words or node.tag == "tag:yaml.org,2002:null":
        remedy = f"leave {key} out to match every one"
        raise RecipeError(_line(node), f"a {key} that is empty", f"a {key}, or a list of them", remedy)
    return tuple(_word(entry, f"a {key}, or a list of them") for entry in words)


def _word(node: yaml.Node, expected: str) -> Word:
    if not isinstance(node, yaml.ScalarNode):
        raise RecipeError(_line(node), _shown(node), expected)
    kind = node.tag.rpartition(":")[2]
    return Word(node.value, _line(node), None if kind == "str" else _KINDS.get(kind, kind))


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"{node.value!r:.60}" if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _line_at(before: str) -> int:
    return len(_LINE_BREAK.findall(before)) + 1


def _syntax(error: yaml.MarkedYAMLError) -> RecipeError:
    """PyYAML's words for it in one line."""
    mark = error.problem_mark or error.context_mark
    assert mark, "PyYAML says where"
    found = f"column {mark.column + 1}: {error.problem or error.context!s:.200}"
    if error.problem and error.context_mark and error.context_mark.line != mark.line:
        found += f", {error.context} from line {error.context_mark.line + 1}"
    tabs = "\\t" in found
    return RecipeError(mark.line + 1, found, "YAML", "indent with spaces, not tabs" if tabs else "mend this line")
