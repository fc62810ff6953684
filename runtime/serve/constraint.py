"""What an answer has to look like, as a grammar: JSON, JSON of a schema, or calls of tools, after any thinking."""

import json

from mosaic.runtime.serve.chat_schema import ChatRequest
from mosaic.runtime.text.tool_calls import ToolFormat, call_grammar

#: Thinking may say anything; the grammar begins after it.
AFTER_THINKING = """\
start: thinking /\\s*/ %lark {{
{grammar}
}}
thinking[suffix="</think>"]: /(?s:.*)/
"""


def grammar(asked: ChatRequest, tool_format: ToolFormat | None, inside_reasoning: bool) -> str | None:
    """The grammar (llguidance's Lark) of what was asked for; None: any text."""
    if asked.forced:
        assert tool_format
        text = call_grammar(asked.offered, tool_format)
    elif asked.schema_wanted is not None:
        text = f"start: %json {json.dumps(asked.schema_wanted)}"
    else:
        return None
    return AFTER_THINKING.format(grammar=text) if inside_reasoning else text
