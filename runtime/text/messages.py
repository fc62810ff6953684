"""Messages as the API has them, checked, and in the form the models' templates take.

Templates add contents up as strings and walk through arguments as mappings; the API has lists of parts, null, and JSON
in strings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mosaic.format.errors import InputError
from mosaic.runtime.text.values import parse_json

Message = Mapping[str, Any]


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies with contents as strings and arguments as mappings; InputError names the message that is not sound."""
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise _refused(where, message, 'an object with a "role" and "content"')
    copy = dict(message)
    calls = copy.pop("tool_calls", None)
    copy["content"] = _text(message.get("content"), f"{where}.content", nothing=role == "assistant")
    if calls is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise _refused(f"{where}.tool_calls", calls, "a list")
        copy["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return copy


def _text(content: Any, where: str, nothing: bool) -> str:
    """A content as one string. `nothing`: null will do, since a message can consist of calls."""
    if isinstance(content, str):
        return content
    if content is None and nothing:
        return ""
    if not isinstance(content, Sequence):
        raise _refused(where, content, "a string, or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise _refused(f"{where}[{number}]", part, 'text only: {"type": "text", "text": ...}')
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise _refused(where, call, '{"type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise _refused(f"{where}.function.arguments", error, "a JSON object") from error
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _refused(f"{where}.function.arguments", arguments, "a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _refused(where: str, found: object, expected: str) -> InputError:
    return InputError(f"{where} cannot be used", found=str(found)[:200], expected=expected, remedy="change the message")
