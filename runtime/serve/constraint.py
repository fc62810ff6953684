"""What an answer has to look like, as a grammar: JSON, JSON of a schema, or calls of tools, after any thinking."""

from mosaic.runtime.serve.chat_schema import ChatRequest
from mosaic.runtime.text.lark import json_of, reply
from mosaic.runtime.text.tool_calls import ToolFormat, call_grammar


def grammar(asked: ChatRequest, tool_format: ToolFormat | None, inside_reasoning: bool) -> str | None:
    """The grammar (llguidance's Lark) of what was asked for; None: any text. InputError for tools that have none."""
    if asked.forced:
        assert tool_format
        return call_grammar(asked.offered, tool_format, inside_reasoning=inside_reasoning)
    if asked.schema_wanted is None:
        return None
    return reply(json_of(asked.schema_wanted), thinking=inside_reasoning)
