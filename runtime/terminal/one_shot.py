"""One prompt, one answer: from the command line, a file or a pipe, to standard output as text or as JSON."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mosaic.format.errors import InputError
from mosaic.runtime.terminal.conversation import Conversation

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.terminal.asking import Asker, Reply
    from mosaic.runtime.terminal.session import Session

INTERRUPTED = 130
#: As the API calls them.
_REASONS = {"stop token": "stop", "stop string": "stop", "max tokens": "length", "context full": "length"}


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """A file's text, then the prompt; `-`, or nothing at all, is standard input. InputError if that is empty."""
    texts = [_decoded(_read(file), file)] if file else []
    if prompt == "-" or (prompt is None and not file):
        texts.append(_decoded(sys.stdin.buffer.read() if sys.stdin else b"", "standard input"))
    elif prompt is not None:
        texts.append(prompt)
    text = "".join(text if text.endswith("\n") else f"{text}\n" for text in texts[:-1]) + texts[-1]
    if not text.strip():
        raise InputError("the prompt is empty", found=repr(text), expected="some text", remedy="write a prompt")
    return text


def answer_once(
    engine: "Engine", asker: "Asker", conversation: Conversation, prompt: str, session: "Session | None", as_json: bool
) -> None:
    """Answer a prompt; `as_json`: the answer is one object on standard output. Ends with 130 after Ctrl-C."""
    conversation.say(prompt)
    reply = asker(conversation)
    if reply.unborn:
        conversation.take_back()
    else:
        conversation.answer(reply.message)
    if as_json:
        print(json.dumps({**_as_dict(reply), "tuned": asdict(engine.tuned)}))
    if session:
        session.keep(engine, conversation)
    if reply.interrupted:
        raise typer.Exit(INTERRUPTED)


def _as_dict(reply: "Reply") -> dict[str, object]:
    message, stats = reply.message, reply.stats
    return {
        "content": message["content"],
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": message.get("tool_calls", []),
        "finish_reason": _REASONS.get(reply.reason, str(reply.reason)),
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.generated_tokens,
            "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        },
        "stats": stats.as_dict(),
    }


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        remedy = "check the path"
        raise InputError("cannot read the prompt", file=file, found=error.strerror, remedy=remedy) from error


def _decoded(data: bytes, where: Path | str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        remedy = "convert the text first"
        raise InputError("the prompt is not UTF-8", file=where, found=error, expected="UTF-8", remedy=remedy) from error
