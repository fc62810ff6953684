"""The chat on a terminal: typed, pasted, stopped, taken back, saved; on a good terminal and on a dumb one."""

import json
import re
import stat
import time

import pytest

from support.mosaic_run import REASONED
from support.pseudo_terminal import Terminal, plain

GREEDY = ("--temperature", 0, "--max-tokens", 6)
ENDLESS = ("--temperature", 1, "--seed", 1, "--max-tokens", 4000, "--logit-bias", "0=-1")
READY = r">\s*$"
DONE = r"ended by [a-z -]+\s+>\s*$"
PASTE = "\x1b[200~{}\x1b[201~"


@pytest.fixture
def chat(demo, tmp_path):
    """Starts a chat, which keeps its history in `tmp_path`."""

    def start(*options: object, model=demo, **settings) -> Terminal:
        terminal = Terminal(model, *options, XDG_STATE_HOME=str(tmp_path), **settings)
        terminal.read_until(READY)
        return terminal

    return start


def turns(file) -> list[tuple[str, str]]:
    """(role, content) of a saved conversation."""
    return [(message["role"], message["content"]) for message in json.loads(file.read_text())["messages"]]


def test_a_chat_from_greeting_to_end(chat, tmp_path):
    saved = tmp_path / "talk.json"
    with chat(*GREEDY) as terminal:
        terminal.type("Who was Moses?\r")
        first = terminal.read_until(DONE)
        assert re.search(r"prompt \d+ \(0 reused\), [\d.]+ tok/s; answer 6, [\d.]+ tok/s, [\d.]+ GB/s", first)
        assert "hit rate 100.0%; ended by max tokens" in first
        terminal.type("/retry\r")
        again = terminal.read_until(DONE)
        assert re.search(r"prompt (\d+) \([1-9]\d* reused\)", again)
        terminal.type(f"/save {saved}\r")
        terminal.read_until(r"2 messages saved.*\s+>\s*$")
        terminal.type("/hepl\r")
        assert "did you mean /help?" in terminal.read_until(r"/help\s+>\s*$")
        terminal.type("And then?\r")
        third = terminal.read_until(DONE)
        assert re.search(r"\([1-9]\d* reused\)", third)
        terminal.type("/set seed 5\r")
        terminal.read_until(r"seed: 5\s+>\s*$")
        terminal.type("/clear\r")
        terminal.read_until(r"forgotten\s+>\s*$")
        terminal.type(f"/load {saved}\r")
        terminal.read_until(r"2 messages loaded.*\s+>\s*$")
        terminal.type("\x04")
        assert terminal.end() == 0
    question, answer = turns(saved)
    assert question == ("user", "Who was Moses?")
    for shown in (first, again):
        assert answer[1].strip() in shown
    history = tmp_path / "mosaic" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert [json.loads(line) for line in history.read_text().splitlines()][:2] == ["Who was Moses?", "/retry"]


def test_what_is_typed_during_an_answer_is_kept_for_the_next_prompt(chat):
    with chat("--temperature", 0, "--logit-bias", "4082=-inf", "--max-tokens", 300) as terminal:
        terminal.type("Tell me all.\r")
        terminal.read_until(r"all\.\s+\S+ \S+ \S+")
        terminal.type("typed ahead")
        said = terminal.read_until(r"ended by max tokens\s+>[^>]*typed ahead\s*$")
    assert said.count("typed ahead") == 1  # at the prompt, and not within the answer


def test_pasted_and_typed_lines_are_one_message(chat, tmp_path):
    saved = tmp_path / "talk.json"
    with chat(*GREEDY) as terminal:
        terminal.type(PASTE.format("first\rsecond\n/third"))
        terminal.type("\x1b\rfourth\\\rfifth \u4e2d\U0001f600\r")
        terminal.read_until(DONE)
        terminal.type("half a line\x03")
        terminal.read_until(r"half a line\s+>\s*$")
        terminal.type(f"/sav\t {saved}\r")
        terminal.read_until(r"saved in.*\s+>\s*$")
        terminal.type("/exit\r")
        assert terminal.end() == 0
    assert turns(saved)[0] == ("user", "first\nsecond\n/third\nfourth\nfifth \u4e2d\U0001f600")


def test_ctrl_c_stops_an_answer_and_keeps_what_came(chat, tmp_path):
    saved = tmp_path / "talk.json"
    with chat(*ENDLESS) as terminal:
        terminal.type("Who was Moses?\r")
        terminal.read_until(r"Moses\?\s+\S.{20}")
        terminal.type("\x03")
        stopped = terminal.read_until(DONE)
        assert "ended by cancelled" in stopped
        terminal.type("/set max_tokens 4\r")
        terminal.read_until(r"max_tokens: 4\s+>\s*$")
        terminal.type("Go on.\r")
        after = terminal.read_until(DONE)
        terminal.type(f"/save {saved}\r")
        terminal.read_until(r"4 messages saved.*\s+>\s*$")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert [role for role, _ in turns(saved)] == ["user", "assistant", "user", "assistant"]
    said = turns(saved)[1][1]
    assert len(said) > 20
    # What was computed before Ctrl-C is not computed again: the new prompt holds that answer, and few tokens more.
    prompt, reused = map(int, re.search(r"prompt (\d+) \((\d+) reused\)", after.replace(",", "")).groups())
    assert reused > 20
    assert prompt > reused


def test_a_dumb_terminal_will_do(chat, tiny, tmp_path):
    saved = tmp_path / "talk.json"
    with chat(*REASONED, "--stats", "json", model=tiny, term="dumb", errors=True) as terminal:
        terminal.type("one\\\rtwo\r")
        assert "<think>\nA\n</think>\n\nAAAA\n" in terminal.read_until(r"AAAA\s+>\s*$")
        terminal.type("never said")
        terminal.read_until("never said")
        time.sleep(0.5)  # Python forgets a Ctrl-C that comes just before it begins to wait for a line
        terminal.type("\x03")
        terminal.read_until(READY)
        terminal.type("   \r")
        terminal.read_until(READY)
        terminal.type(f"/save {saved}\r")
        terminal.read_until(READY)
        terminal.type("\x04")
        _, err = terminal.process.communicate(timeout=60)
    assert b"\x1b" not in terminal.sent + err
    assert b"Traceback" not in err
    assert terminal.process.returncode == 0
    figures = [json.loads(line) for line in err.splitlines() if line.startswith(b"{")]
    assert [each["stop_reason"] for each in figures] == ["max tokens"]
    assert turns(saved)[0] == ("user", "one\ntwo")


def test_utf8_that_is_split_over_reads(chat, tmp_path):
    saved = tmp_path / "talk.json"
    text = "\u4e2d\U0001f600e\u0301"
    with chat(*GREEDY) as terminal:
        terminal.type_bytes(*(bytes([byte]) for byte in text.encode()))
        terminal.type("\r")
        terminal.read_until(DONE)
        terminal.type(f"/save {saved}\r")
        terminal.read_until(r"saved in.*\s+>\s*$")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert turns(saved)[0] == ("user", text)


def test_what_cannot_be_done_is_told_and_the_chat_goes_on(chat, tmp_path):
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"messages": [')
    with chat("--context", 60, *GREEDY, "--hide-thinking") as terminal:
        terminal.type(f"/load {damaged}\r")
        assert "not a sound JSON file" in terminal.read_until(r"remedy: .*\s+>\s*$")
        terminal.type(f"/save {damaged}\r")
        terminal.read_until(r"remedy: .*\s+>\s*$")
        terminal.type(f"{'all the words ' * 40}\r")
        refused = terminal.read_until(r"/clear.*\s+>\s*$")
        assert "does not fit the context" in refused
        terminal.type("/undo\r")
        terminal.read_until(r"nothing to take back[\s\S]*\s>\s*$")
        terminal.type("Hello.\r")
        terminal.read_until(DONE)
        terminal.type("/stats\r")
        assert re.search(r"generated tokens +6", terminal.read_until(r"disk ceiling.*\s+>\s*$"))
        terminal.type("\x04")
        assert terminal.end() == 0
    assert damaged.read_text() == '{"messages": ['
    assert "Traceback" not in plain(terminal.sent.decode())


def test_a_session_lasts_and_is_greeted(chat, demo, tmp_path):
    file = tmp_path / "talk.session"
    with chat(*GREEDY, "--session", file) as terminal:
        terminal.type("Who was Moses?\r")
        terminal.read_until(DONE)
        terminal.process.kill()
    with Terminal(demo, *GREEDY, "--session", file) as terminal:
        terminal.read_until(r"going on after 2 messages\s+>\s*$")
        terminal.type("And then?\r")
        assert re.search(r"\([1-9]\d* reused\)", terminal.read_until(DONE))
        terminal.type("\x04")
        assert terminal.end() == 0


def test_answers_elsewhere_than_the_terminal(demo, tmp_path):
    """`mosaic-run OUT > file`: prompts go to standard error, answers alone to the file."""
    file = tmp_path / "answers"
    with file.open("wb") as out, Terminal(demo, *GREEDY, out=out) as terminal:
        terminal.read_until(READY)
        terminal.type("Who was Moses?\r")
        shown = terminal.read_until(DONE)
        terminal.type("\x04")
        assert terminal.end() == 0
    said = file.read_text()
    assert said.strip()
    assert said.strip() not in shown
    assert "\x1b" not in said
