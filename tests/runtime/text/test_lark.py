"""How a grammar begins. What it makes of JSON and calls is tested where they are."""

import pytest

from mosaic.runtime.text.lark import json_of, reply


def allows(grammar: str, text: str) -> bool:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    assert llguidance.LLMatcher.validate_grammar(grammar, tokenizer) == ""
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("thought", ["</think>", "so {1}\n</think>\n\n", "</think>\n\n\n\n"])
def test_an_answer_comes_after_its_thoughts(thought):
    grammar = reply(json_of({"type": "integer"}), thinking=True)
    assert allows(grammar, f"{thought}7")
    assert not allows(grammar, f"{thought}x")
    assert not allows(grammar, "7")


def test_line_breaks_come_to_an_end():
    assert not allows(reply('"x"', thinking=True), "</think>\n\n\n\n\nx")


def test_without_thoughts_there_is_the_answer_only():
    grammar = reply('"x"', thinking=False)
    assert allows(grammar, "x")
    assert not allows(grammar, "</think>x")
