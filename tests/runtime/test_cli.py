"""mosaic-run as its users meet it: processes, exit codes, a terminal. Most refusals run in this process."""

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from mosaic import recipes
from mosaic.recipes import DEMO_CHECKPOINT, demo_model
from mosaic.runtime.cli import main

PROGRAM = str(Path(sys.executable).with_name("mosaic-run"))
PROMPT = "Tell me about the sea."
PATIENCE = 60.0  # seconds for what takes two on an idle core


def run(*arguments: object, given: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A finished process. `given` is its standard input."""
    data = given.encode() if isinstance(given, str) else given
    result = subprocess.run(
        [PROGRAM, *map(os.fsencode, map(str, arguments))],
        input=data,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout.decode(), result.stderr.decode(errors="replace")
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, found and remedy on standard error, no traceback, nothing on standard output."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs mosaic-run in this process and checks that it refuses."""

    def check(*arguments: object, words: tuple[str, ...], given: str = "") -> None:
        monkeypatch.setattr(sys, "argv", ["mosaic-run", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert_refused(subprocess.CompletedProcess([], caught.value.code, out, err), *words)

    return check


# --- answers ----------------------------------------------------------------------------------------------------------


def test_greedy_answers_repeat_and_figures_are_the_last_line(demo):
    options = ("--temperature", 0, "--max-tokens", 12)
    first = run(demo, PROMPT, *options)
    second = run(demo, "-", *options, "--stats", "json", given=PROMPT)
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout == second.stdout
    assert first.stdout.endswith("\n")
    assert len(first.stdout) > 12
    assert first.stderr == ""
    figures = json.loads(second.stderr.splitlines()[-1])
    assert figures["generated_tokens"] == 12
    assert figures["stop_reason"] == "max tokens"
    assert figures["prompt_tokens"] > 5
    assert figures["decode_tok_s"] > 0


def test_raw_continues_the_text_itself(demo):
    """Without the template the prompt is some tokens shorter, and nothing is a question any more."""
    result = run(demo, PROMPT, "--raw", "--temperature", 0, "--max-tokens", 12, "--stats", "text")
    assert result.returncode == 0
    from mosaic.runtime.tokenizer import Tokenizer

    assert f"prompt {len(Tokenizer(demo).encode(PROMPT))} tokens (0 reused)" in result.stderr
    assert "answer 12 tokens" in result.stderr
    assert "ended by max tokens" in result.stderr


def test_a_seed_makes_sampling_repeat(tiny):
    """Of 261 tokens, 15 drawn twice without a seed would agree once in some 10^30. Another seed: test_engine."""
    options = ("--temperature", 1.5, "--top-k", 0, "--top-p", 1, "--max-tokens", 15, "--seed", 1)
    first, second = (run(tiny, "x", *options) for _ in range(2))
    assert first.returncode == 0
    assert first.stdout == second.stdout


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_unconverted_checkpoint_is_refused_with_the_remedy():
    assert_refused(run(DEMO_CHECKPOINT, PROMPT), "not a Mosaic model directory", "mosaic-convert", str(DEMO_CHECKPOINT))


def test_a_missing_directory_is_refused(refused, tmp_path):
    refused(tmp_path / "none", PROMPT, words=("no such model directory", "check the path"))


def test_any_other_directory_is_refused(refused, tmp_path):
    refused(tmp_path, PROMPT, words=("not a Mosaic model directory", "no mosaic.json", "mosaic-convert"))


def test_a_file_for_a_directory_is_refused(refused, demo):
    refused(demo / "config.json", PROMPT, words=("no such model directory", "a file"))


def test_an_unfinished_conversion_is_refused(refused, tmp_path):
    (tmp_path / ".mosaic-convert").mkdir()
    refused(tmp_path, PROMPT, words=("unfinished conversion", "mosaic-convert"))


def test_a_truncated_shard_is_refused(refused, tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    shard = model / "layers-02.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refused(model, PROMPT, words=("layers-02.safetensors", "remedy"))


def test_a_missing_shard_is_refused(refused, tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "outside.safetensors").unlink()
    refused(model, PROMPT, words=("outside.safetensors", "nothing", "remedy"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("layer", ("experts.npy", "remedy")),
        ("shard", ("experts.npy",)),
        ("offset", ("experts.npy",)),
    ],
)
def test_an_expert_index_that_lies_is_refused(refused, tiny, tmp_path, damage, words):
    """Of the right size, as the catalog demands, but with other contents."""
    import numpy as np

    model = shutil.copytree(tiny, tmp_path / "model")
    rows = np.load(model / "experts.npy")
    rows[damage][0] = {"shard": b"none.safetensors", "offset": 2**62, "layer": 99}[damage]
    np.save(model / "experts.npy", rows)
    refused(model, PROMPT, "--temperature", 0, "--max-tokens", 1, words=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv", "int8"), ("--kv", "int8", "f32, bf16, e4m3")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--temperature", "hot"), ("--temperature",)),
        (("--top-p", "0"), ("top_p",)),
        (("--top-k", "-2"), ("top_k", "-2")),
        (("--context", "0"), ("--context",)),
        (("--context", "99999"), ("--context", "99999", "4,096")),
        (("--context", "3"), ("does not fit the context",)),
        (("--max-tokens", "0"), ("--max-tokens",)),
        (("--seed", "-1"), ("--seed",)),
        (("--threads", "0"), ("--threads",)),
        (("--no-such-option",), ("--no-such-option",)),
        (("--ram", "much"), ("--ram is no size", "much", "8GiB")),
        (("--ram", "10MiB"), ("the memory does not suffice", "10.00 MiB", "at least", "--ram")),
        (("--stats", "loud"), ("--stats", "loud", "text, json, live")),
        (("--warm", "none.json"), ("none.json",)),
        (("--record-routing", "."), ("cannot write a trace", "directory")),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(refused, tiny, options, words):
    refused(tiny, "a prompt", *options, words=words)


def test_a_trace_of_something_else_is_not_written_to(refused, tiny, tmp_path):
    file = tmp_path / "precious"
    file.write_text("not a trace")
    refused(tiny, "a prompt", "--record-routing", file, words=("not a routing trace", "precious"))
    assert file.read_text() == "not a trace"


@pytest.mark.parametrize("arguments", [(), ("--demo", "one", "two"), ("--raw",)], ids=str)
def test_unclear_commands_are_refused(refused, arguments):
    refused(*arguments, words=("what to run is not clear", "mosaic-run"))


@pytest.mark.parametrize("options", [("-", "--raw"), ("--raw",)], ids=str)
def test_empty_standard_input_is_refused_raw(refused, tiny, options):
    refused(tiny, *options, words=("prompt is empty",))


@pytest.mark.parametrize("given", ["", "\n"], ids=repr)
def test_empty_standard_input_is_refused(refused, tiny, given):
    """The template makes a prompt of nothing too; it is nothing all the same."""
    refused(tiny, "-", "--max-tokens", 1, given=given, words=("prompt is empty",))


def test_a_prompt_that_is_not_utf8_is_refused(refused, tiny):
    """Python hands over an argument like $'\\xff' with a lone surrogate in it."""
    refused(tiny, "a\udcff", words=("UTF-8",))


# --- budgets of memory ------------------------------------------------------------------------------------------------


def test_a_plan_and_the_same_words_within_it(demo, tmp_path):
    """A budget that has no room for all experts: told beforehand, kept, and the answer is the same."""
    cache, options = {"XDG_CACHE_HOME": str(tmp_path)}, ("--context", 512)
    whole = json.loads(run(demo, "--plan", "--stats", "json", *options, **cache).stdout)
    assert whole["expert_slots"] is None
    assert whole["total_bytes"] == sum(whole["items"].values()) <= whole["budget_bytes"]
    ram = whole["total_bytes"] - (8 << 20)
    text = run(demo, "--plan", "--ram", ram, *options, **cache)
    assert text.returncode == 0
    assert "expert slots" in text.stdout
    assert "expected with uniform routing" in text.stdout
    answer = (PROMPT, "--temperature", 0, "--max-tokens", 20, *options)
    plain, bounded = run(demo, *answer), run(demo, *answer, "--ram", ram, "--stats", "json")
    assert bounded.stdout == plain.stdout
    figures = json.loads(bounded.stderr.splitlines()[-1])
    assert figures["expert_misses"] > 0
    assert figures["disk_bytes"] > 0


def test_recorded_routing_is_replayed(demo, tmp_path):
    file = tmp_path / "demo.trace"
    assert run(demo, PROMPT, "--max-tokens", 20, "--record-routing", file).returncode == 0
    replayed = subprocess.run(
        [PROGRAM.replace("mosaic-run", "mosaic-bench"), "--replay", file, "--slots", "40", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "hit rate" in replayed.stdout or "ours" in replayed.stdout
    assert json.loads(replayed.stdout.splitlines()[-1])


# --- what a process does ----------------------------------------------------------------------------------------------


def test_help_is_complete_and_loads_no_torch():
    """By the list of imports, and in under a second of processor time, which a busy machine does not stretch."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", PROGRAM, "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert result.returncode == 0
    imported = {
        line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert "mosaic.runtime.cli" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "tokenizers", "jinja2", "transformers")}
    micros = [
        int(line.split("|")[1]) for line in result.stderr.splitlines() if re.match(r"import time:\s+\d+ \|", line)
    ]
    assert max(micros) < 1_000_000
    options = ("--demo", "--raw", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--context", "--kv")
    more = ("--threads", "--stats", "--ram", "--plan", "--warm", "--record-routing", "--prefetch", "--check")
    for option in (*options, *more):
        assert re.search(rf"{option}\b.*\w", result.stdout), option


def test_ctrl_c_ends_an_answer_with_130(demo):
    with subprocess.Popen(
        [PROGRAM, str(demo), PROMPT, "--temperature", "1", "--seed", "1", "--max-tokens", "5000", "--raw"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & ignores it
    ) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_is_no_traceback(demo):
    with subprocess.Popen(
        [PROGRAM, str(demo), PROMPT, "--raw", "--temperature", "1", "--seed", "1", "--max-tokens", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=PATIENCE)
    assert b"Traceback" not in err
    assert process.returncode == 1  # typer's own for EPIPE


# --- the demo ---------------------------------------------------------------------------------------------------------


def test_two_first_uses_of_the_demo_at_once_and_a_second_use(tmp_path):
    command = [PROGRAM, "--demo", PROMPT, "--temperature", "0", "--max-tokens", "4"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=PATIENCE) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert any("converting the embedded demo" in err for _, err in results)
    assert len(list((tmp_path / "mosaic").iterdir())) == 1  # one model, no scratch left
    again = run("--demo", PROMPT, "--temperature", 0, "--max-tokens", 4, XDG_CACHE_HOME=str(tmp_path))
    assert again.stdout == results[0][0]
    assert "converting" not in again.stderr


@pytest.fixture
def conversion(monkeypatch, tmp_path):
    """demo_model with a converter that writes only a catalog, and runs `meanwhile` before it ends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "mosaic" / f"demo-{recipes._digest(DEMO_CHECKPOINT)}"

    def prepare(meanwhile=lambda model: None) -> Path:
        def convert(command: list[str], **_: object) -> None:
            made = Path(command[-2])
            made.mkdir()
            (made / "mosaic.json").write_text("mine")
            meanwhile(model)

        monkeypatch.setattr(recipes.subprocess, "run", convert)
        return model

    return prepare


@pytest.mark.parametrize("options", [("--kv", "int8"), ("--ops", "gpu"), ("--activations", "f16")])
def test_options_are_checked_before_the_demo_is_converted(options, tmp_path):
    found = run("--demo", *options, "Ruth", XDG_CACHE_HOME=str(tmp_path))
    assert found.returncode == 2, found
    assert options[1] in found.stderr
    assert not list(tmp_path.iterdir())


def test_the_demo_is_converted_once(conversion, capsys):
    model = conversion()
    assert demo_model() == model
    assert (model / "mosaic.json").read_text() == "mine"
    assert "converting" in capsys.readouterr().err
    assert demo_model() == model
    assert capsys.readouterr().err == ""


def test_remains_without_a_catalog_are_replaced(conversion):
    model = conversion()
    model.mkdir(parents=True)
    (model / "layers-00.safetensors").write_text("half")
    assert demo_model() == model
    assert [file.name for file in model.iterdir()] == ["mosaic.json"]


def test_a_model_that_another_process_finished_meanwhile_stays(conversion):
    """It may be mapped by that process, or half read."""

    def meanwhile(model: Path) -> None:
        model.mkdir()
        (model / "mosaic.json").write_text("theirs")

    model = conversion(meanwhile)
    assert demo_model() == model
    assert (model / "mosaic.json").read_text() == "theirs"


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(run("--demo", PROMPT, XDG_CACHE_HOME=str(tmp_path / "file")), str(tmp_path / "file"))


# --- a chat on a terminal ---------------------------------------------------------------------------------------------


class Terminal:
    """A process on a pseudo terminal of its own, so that Ctrl-C reaches it as from a keyboard."""

    def __init__(self, *arguments: object) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self.master)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read_until(self, pattern: str) -> str:
        """What was printed up to a match at the end of it."""
        seen, end = "", time.monotonic() + PATIENCE
        while not re.search(pattern, seen):
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"waited for {pattern!r}, saw {seen!r}"
            try:
                data = os.read(self.master, 4096)
            except OSError:  # the process is gone
                data = b""
            assert data, f"ended before {pattern!r}, saw {seen!r}"
            seen += data.decode(errors="replace")
        return seen


def test_a_chat_survives_ctrl_c_and_ends_with_ctrl_d(demo):
    asked = "Who was Moses?"
    with Terminal(demo, "--temperature", 0, "--max-tokens", 100, "--stats", "json", "--ops", "reference") as terminal:
        terminal.read_until(r"> $")
        terminal.type(f"{asked}\r")
        first = terminal.read_until(r"\n> $")
        terminal.type("And then?\r")
        terminal.read_until(r"And then\?\s*\n[^\r\n]+")  # the answer has begun
        terminal.type("\x03")
        terminal.read_until(r"\n> $")
        terminal.type("   \r")  # nothing said, nothing answered
        terminal.read_until(r"> $")
        terminal.type("And then?\r")
        third = terminal.read_until(r"\n> $")
        terminal.type("\x04")
        _, err = terminal.process.communicate(timeout=PATIENCE)
    assert terminal.process.returncode == 0
    assert b"Traceback" not in err
    figures = [json.loads(line) for line in err.splitlines() if line.startswith(b"{")]
    assert len(figures) == 2  # the interrupted answer has none
    assert len(first.replace(asked, "").strip(" >\r\n")) > 5
    assert len(third.replace("And then?", "").strip(" >\r\n")) > 5
    # The interrupted question was taken back: one more question than the first turn, and not two.
    grown = figures[1]["prompt_tokens"] - figures[0]["prompt_tokens"] - figures[0]["generated_tokens"]
    assert 0 < grown < 2 * figures[0]["prompt_tokens"] - 4


@pytest.mark.parametrize("program", ["mosaic-run", "mosaic-verify"])
def test_a_full_disk_behind_standard_output(program, demo):
    """/dev/full takes nothing: exit code 2 and a sentence, no traceback."""
    arguments = [str(demo), *(["hi", "--max-tokens", "2"] if program == "mosaic-run" else [])]
    script = str(Path(sys.executable).with_name(program))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([script, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_standard_input(demo):
    script = str(Path(sys.executable).with_name("mosaic-run"))
    done = subprocess.run(["bash", "-c", f"exec {script} {demo} - <&-"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the prompt is empty" in done.stderr


def test_a_full_context_is_told(demo):
    script = str(Path(sys.executable).with_name("mosaic-run"))
    command = [script, str(demo), "--raw", "Mr. Darcy", "--context", "6", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "context of 6 tokens is full" in done.stderr
