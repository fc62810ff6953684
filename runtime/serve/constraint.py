"""What an answer has to look like, as a grammar: JSON, JSON of a schema, or calls of tools, after any thinking."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mosaic.format.errors import InputError
from mosaic.runtime.sampler import TokenMask
from mosaic.runtime.serve.chat_schema import ChatRequest
from mosaic.runtime.serve.errors import refused
from mosaic.runtime.text.lark import json_of, reply
from mosaic.runtime.text.tool_calls import ToolFormat, call_grammar

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine


@dataclass(frozen=True)
class Constraint:
    """A grammar (llguidance's Lark), and the parameter that asked for it."""

    grammar: str
    param: str

    def masks(self, engine: "Engine", count: int) -> list[TokenMask]:
        """So many of its masks. ApiError for a grammar that cannot be followed."""
        try:
            return [engine.grammars.lark(self.grammar) for _ in range(count)]
        except InputError as error:
            raise refused(error, self.param) from error


def constraint(asked: ChatRequest, tool_format: ToolFormat | None, inside_reasoning: bool) -> Constraint | None:
    """What was asked for; None: any text. ApiError for tools that have no grammar."""
    if asked.forced:
        assert tool_format
        try:
            return Constraint(call_grammar(asked.offered, tool_format, inside_reasoning=inside_reasoning), "tools")
        except InputError as error:
            raise refused(error, "tools") from error
    if asked.schema_wanted is None:
        return None
    return Constraint(reply(json_of(asked.schema_wanted), thinking=inside_reasoning), "response_format")
