"""The commands of the chat: what they are called, what they say, and what they do to a conversation. Prints nothing."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.runtime.terminal.conversation import Conversation
from mosaic.runtime.terminal.figures import Figures, figure_lines
from mosaic.runtime.terminal.settings import AS_THE_MODEL, KINDS

COMMAND = re.compile(r"/([A-Za-z?]*)(?:\s+(.*))?", re.DOTALL)
NOTHING = "off"


@dataclass(frozen=True)
class Outcome:
    """What is to be told, and what comes next."""

    text: str = ""
    answer: bool = False  # the user's last message is to be answered
    over: bool = False


@dataclass(frozen=True)
class Command:
    """`run` is given the conversation, what stands after the name, and the figures of the last answer."""

    usage: str
    help: str
    run: Callable[[Conversation, str, Figures | None], Outcome]


def is_command(text: str) -> bool:
    """Whether a text is meant as a command: /name, but not a path nor a comment."""
    return COMMAND.fullmatch(text) is not None


def run(text: str, conversation: Conversation, figures: Figures | None) -> Outcome:
    """Do what a command says; InputError if it is none, or cannot be done."""
    match = COMMAND.fullmatch(text)
    assert match
    name = ALIASES.get(match[1].lower(), match[1].lower())
    if name not in COMMANDS:
        raise InputError("no such command", found=f"/{match[1]}", remedy=f"{_nearest(name, '/', list(COMMANDS))}/help")
    return COMMANDS[name].run(conversation, (match[2] or "").strip(), figures)


def _nearest(name: str, mark: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {mark}{close[0]}? all of them: " if close else "all of them: "


def _help(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    return Outcome("\n".join([*lines, "", *KEYS]))


def _system(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    if conversation.raw:
        raise _only_with_a_template("/system")
    if rest:
        conversation.system = None if rest == NOTHING else rest
    return Outcome(f"system: {'none' if conversation.system is None else conversation.system}")


def _clear(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    conversation.clear()
    return Outcome("forgotten" if conversation.system is None else "forgotten, but for the system message")


def _save(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    file = _file("/save", rest)
    conversation.save(file)
    return Outcome(f"{_count(conversation)} saved in {file}")


def _load(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    file = _file("/load", rest)
    conversation.load(file)
    return Outcome(f"{_count(conversation)} loaded from {file}")


def _stats(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    return Outcome("no answer yet" if figures is None else "\n".join(figure_lines(figures)))


def _think(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    if conversation.raw:
        raise _only_with_a_template("/think")
    if rest:
        conversation.settings.set("thinking", rest)
    return Outcome(f"thinking: {conversation.settings.shown('thinking')}")


def _set(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    settings = conversation.settings
    typed, _, value = rest.partition(" ")
    name = typed.lstrip("-").replace("-", "_").lower()
    if not typed:
        changed = {name: "" if name in settings.changed else "  (the model's)" for name in KINDS}
        return Outcome("\n".join(f"{name:<20}{settings.shown(name)}{mark}" for name, mark in changed.items()))
    if name not in KINDS:
        raise InputError("no such setting", found=typed, remedy=_nearest(name, "", list(KINDS)) + ", ".join(KINDS))
    if value.strip():
        settings.set(name, value.strip())
    return Outcome(f"{name}: {settings.shown(name)}")


def _undo(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    said = conversation.take_back()
    if said is None:
        raise InputError("nothing to take back", found="no message of yours", remedy="say something first")
    return Outcome(f"taken back: {said if len(said) < QUOTED else said[:QUOTED] + ' ...'}")


def _retry(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    said = conversation.take_back()
    if said is None:
        raise InputError("nothing to answer again", found="no message of yours", remedy="say something first")
    conversation.say(said)
    fixed = conversation.settings.seed is not None
    return Outcome("the seed is set, so the answer changes only with other settings" if fixed else "", answer=True)


def _exit(conversation: Conversation, rest: str, figures: Figures | None) -> Outcome:
    return Outcome(over=True)


def _file(command: str, rest: str) -> Path:
    if not rest:
        raise InputError(f"{command} needs a file", found="no name", remedy=f"{command} FILE")
    return Path(rest).expanduser()


def _count(conversation: Conversation) -> str:
    count = len(conversation.messages)
    return f"{count} message{'' if count == 1 else 's'}"


def _only_with_a_template(command: str) -> InputError:
    return InputError(f"{command} means nothing with --raw", found="no chat template", remedy="start without --raw")


QUOTED = 60  # characters of a message that are shown to tell which one it was
KEYS = (
    "Alt+Enter, or \\ before Enter, begins a new line; Ctrl-C stops an answer, or clears what is typed; Ctrl-D ends.",
    "A message that looks like a command: put a space before it.",
)
ALIASES = {"quit": "exit", "?": "help"}
COMMANDS = {
    "help": Command("/help", "show this", _help),
    "system": Command("/system [TEXT]", f"what the model is told before all else; {NOTHING}: nothing", _system),
    "clear": Command("/clear", "forget the conversation", _clear),
    "undo": Command("/undo", "take back your last message and its answer", _undo),
    "retry": Command("/retry", "answer your last message again", _retry),
    "think": Command(
        "/think [on|off]", f"whether to think before answering; {AS_THE_MODEL}: as the model has it", _think
    ),
    "set": Command("/set [NAME VALUE]", f"sampling, max_tokens, seed; {AS_THE_MODEL} for VALUE takes it back", _set),
    "save": Command("/save FILE", "write the conversation and its settings", _save),
    "load": Command("/load FILE", "go on with a saved conversation", _load),
    "stats": Command("/stats", "figures of the last answer", _stats),
    "exit": Command("/exit", "end", _exit),
}
