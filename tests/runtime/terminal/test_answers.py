"""One prompt, one answer: where the prompt comes from, and what comes out, to the byte."""

import json

import pytest

from mosaic.runtime.terminal.interrupts import Interrupts
from mosaic.runtime.tokenizer import Tokenizer
from support.mosaic_run import PROMPT, REASONED, run

GREEDY = ("--temperature", 0, "--max-tokens", 12)


@pytest.fixture(scope="module")
def answer(demo):
    """What the demo says to PROMPT."""
    from mosaic.runtime.engine import Engine

    said = Engine.load(demo).chat([{"role": "user", "content": PROMPT}], temperature=0, max_tokens=12)["content"]
    assert len(said) > 12
    return f"{said}\n"


def test_the_answer_is_the_engines_and_a_newline(demo, answer):
    result = run(demo, PROMPT, *GREEDY)
    assert (result.returncode, result.stdout, result.stderr) == (0, answer, "")


def test_prompts_from_pipes_and_files(here, demo, answer, tmp_path):
    file = tmp_path / "prompt"
    file.write_text(PROMPT)
    assert here(demo, "-", *GREEDY, given=PROMPT.encode()).stdout == answer
    assert here(demo, *GREEDY, given=PROMPT.encode()).stdout == answer
    assert here(demo, "-f", file, *GREEDY).stdout == answer
    file.write_text("Tell me about")
    said = json.loads(here(demo, "--file", file, "the sea.", "--json", *GREEDY).stdout)
    expected = json.loads(here(demo, "Tell me about\nthe sea.", "--json", *GREEDY).stdout)
    assert said["content"] == expected["content"]
    assert said["usage"] == expected["usage"]


def test_json_has_the_answer_and_its_figures(here, demo, answer):
    result = here(demo, PROMPT, "--json", *GREEDY)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert f"{found['content']}\n" == answer
    assert (found["reasoning_content"], found["tool_calls"], found["finish_reason"]) == (None, [], "length")
    usage, stats = found["usage"], found["stats"]
    assert usage["completion_tokens"] == stats["generated_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert stats["decode_tok_s"] > 0


def test_figures_are_the_last_line(here, demo, answer):
    result = here(demo, PROMPT, *GREEDY, "--stats", "json")
    assert result.stdout == answer
    figures = json.loads(result.stderr.splitlines()[-1])
    assert (figures["generated_tokens"], figures["stop_reason"]) == (12, "max tokens")
    text = here(demo, PROMPT, *GREEDY, "--stats", "text").stderr
    assert f"prompt {figures['prompt_tokens']} tokens (0 reused)" in text
    assert "answer 12 tokens" in text
    assert "ended by max tokens" in text


def test_raw_continues_the_text_itself(here, demo):
    """Without the template the prompt is some tokens shorter, and nothing is a question any more."""
    result = here(demo, PROMPT, "--raw", *GREEDY, "--json")
    found = json.loads(result.stdout)
    assert found["usage"]["prompt_tokens"] == len(Tokenizer(demo).encode(PROMPT))


def test_reasoning_is_apart_and_not_in_a_pipe_unless_asked_for(here, tiny):
    found = json.loads(here(tiny, "x", *REASONED, "--json").stdout)
    assert (found["reasoning_content"], found["content"]) == ("A", "AAAA")
    assert here(tiny, "x", *REASONED).stdout == "AAAA\n"
    assert here(tiny, "x", *REASONED, "--show-thinking").stdout == "<think>\nA\n</think>\n\nAAAA\n"
    found = json.loads(here(tiny, "x", *REASONED, "--json", "--no-think").stdout)
    assert found["reasoning_content"] is None


def test_a_system_message_is_part_of_the_prompt(here, demo):
    counts = [
        json.loads(here(demo, PROMPT, "--json", "--max-tokens", 1, *options).stdout)["usage"]["prompt_tokens"]
        for options in ((), ("--system", "Speak like a sailor."))
    ]
    assert counts[1] > counts[0] + 5


def test_a_stop_string_ends_the_answer_before_it(here, demo, answer):
    stop = answer[6:10]
    result = here(demo, PROMPT, *GREEDY, "--stop", "never said", "--stop", stop, "--stats", "json")
    assert result.stdout == f"{answer[: answer.index(stop)]}\n"
    assert json.loads(result.stderr.splitlines()[-1])["stop_reason"] == "stop string"


def test_sampling_options_reach_the_sampler(here, tiny):
    """Of a random model, whose answers differ with anything: a seed repeats, and every other option changes them."""
    drawn = ("x", "--raw", "--temperature", 1.5, "--top-k", 0, "--top-p", 1, "--max-tokens", 15, "--seed", 1)
    first, second = (here(tiny, *drawn).stdout for _ in range(2))
    assert first == second
    letter = ord("A")
    only = here(tiny, *drawn, "--logit-bias", f"{letter}=100", "--logit-bias", f"{letter + 1}=-inf")
    assert only.stdout == f"{'A' * 15}\n"
    options = (
        ("--min-p", 0.9),
        ("--top-k", 1),
        ("--top-p", 0.01),
        ("--repetition-penalty", 50),
        ("--presence-penalty", 50),
    )
    likely = {here(tiny, *drawn, "--logit-bias", f"{letter}=9", *map(str, each)).stdout for each in options}
    assert len(likely) > 1


def test_ctrl_c_within_the_prompt_says_nothing_and_keeps_nothing(here, tiny, tmp_path, monkeypatch):
    file = tmp_path / "talk.session"
    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "wanted", property(lambda self: True, lambda self, value: None), raising=False)
        result = here(tiny, "x", "--json", "--session", file, "--stats", "json")
    assert result.returncode == 130
    found = json.loads(result.stdout)
    assert (found["content"], found["finish_reason"]) == ("", "cancelled")
    assert json.loads(result.stderr.splitlines()[-1])["generated_tokens"] == 0
    again, alone = (
        json.loads(here(tiny, "x", "--json", "--max-tokens", 2, "--seed", 3, *options).stdout)["usage"]
        for options in (("--session", file), ())
    )
    assert again == alone  # the message that had no answer was taken back


def test_figures_of_every_operation(here, demo):
    lines = here(demo, PROMPT, *GREEDY, "--profile").stderr
    assert lines.count("between operations") == 2
    assert "answer, 11 tokens" in lines


def test_a_full_context_is_told(here, demo):
    result = here(demo, "--raw", "Mr. Darcy", "--context", 6, "--temperature", 0, "--stats", "json")
    assert result.returncode == 0
    assert "context of 6 tokens is full" in result.stderr
    assert json.loads(result.stderr.splitlines()[-1])["stop_reason"] == "context full"
