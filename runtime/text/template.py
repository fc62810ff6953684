"""Renders conversations with the model's own jinja template, in a sandbox: templates are downloaded code."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.runtime.text.messages import Message, for_template
from mosaic.runtime.text.reasoning import OPEN
from mosaic.runtime.text.tool_calls import ToolFormat

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

#: What a template can raise: it is a program, and not ours.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """The chat template of a model directory.

    `reasoning`: the model may think in <think> tags. `tool_format`: how it is told to call tools, if at all.
    """

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
        own = folder / TEMPLATE_FILE
        self._file = own if own.is_file() else folder / CONFIG_FILE
        try:
            text = own.read_text(encoding="utf-8") if own.is_file() else config.get("chat_template")
        except UnicodeDecodeError as error:
            raise self._refused(error) from error
        if not isinstance(text, str):
            raise InputError(
                "the model directory has no chat template",
                file=folder,
                found=f"neither {TEMPLATE_FILE} nor a chat_template in {CONFIG_FILE}",
                expected="one of them",
                remedy="copy it from the checkpoint, or give --raw to continue plain text",
            )
        self.reasoning = OPEN in text
        self.tool_format = _tool_format(text)
        self._names = {
            name: token for name in ("bos_token", "eos_token", "pad_token") if (token := _token(config, name))
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise self._refused(error) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generate: bool = True,
        **variables: Any,
    ) -> str:
        """Messages, in the API's form, as one text. `generate`: up to where the assistant's next message begins."""
        values = {
            **self._names,
            **variables,
            "messages": for_template(messages),
            "tools": tools or None,
            "add_generation_prompt": generate,
        }
        try:
            return self._template.render(values)
        except _TEMPLATE_ERRORS as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> InputError:
        return InputError(
            "the chat template does not accept this conversation",
            file=self._file,
            found=str(error) or type(error).__name__,
            remedy="change the messages, or give --raw to continue plain text",
        )


def _tool_format(text: str) -> ToolFormat | None:
    """How a template writes the calls of earlier turns."""
    if "<function=" in text:
        return ToolFormat.XML
    return ToolFormat.JSON if "<tool_call>" in text else None


def _token(config: Mapping[str, Any], name: str) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with its content."""
    value = config.get(name)
    return value.get("content") if isinstance(value, dict) else value


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the library's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, with the arguments the templates were written for."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
