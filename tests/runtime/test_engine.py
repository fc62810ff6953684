"""The Python interface as its users meet it, and the examples of docs/PYTHON.md."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import mosaic.runtime
from mosaic.format.errors import InputError
from mosaic.runtime.engine import Engine
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.sampling import generation_defaults
from mosaic.runtime.text.reply import PieceKind
from support.tiny_tokenizer import END_OF_TEXT, IM_END

GUIDE = Path(__file__).parents[2] / "docs" / "PYTHON.md"
PROMPT = "In the beginning"
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def engine(demo) -> Engine:
    return Engine.load(demo, context=512)


def test_the_package_offers_the_engine():
    assert mosaic.runtime.Engine is Engine
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        mosaic.runtime.Motor  # noqa: B018


def test_every_example_of_the_guide_runs(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen-mosaic").symlink_to(demo)
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(examples) >= 7
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
    said = capsys.readouterr().out
    reused, prompt = map(int, re.search(r"(\d+) of (\d+)\n$", said).groups())
    assert prompt > reused > prompt / 2
    assert names["log_likelihood"] < 0
    assert names["messages"][0] == MESSAGES[0]


def test_the_stop_tokens_are_those_of_both_files(tiny):
    """Of the text_config and of generation_config.json."""
    assert Engine.load(tiny).stop == {IM_END, END_OF_TEXT}


@pytest.mark.parametrize("context", [0, -1, 4097])
def test_a_context_the_model_does_not_have_is_refused(tiny, context):
    with pytest.raises(InputError, match="--context") as caught:
        Engine.load(tiny, context=context)
    assert caught.value.facts["found"] == str(context)


def test_the_context_is_the_models_own_unless_given(tiny):
    assert Engine.load(tiny, ops=CpuOps()).context == 4096
    assert Engine.load(tiny, context=4096).context == 4096
    assert Engine.load(str(tiny), context=1).context == 1


def test_sampling_is_the_models_own_but_for_what_is_named(engine, demo):
    assert engine.defaults == generation_defaults(demo).sampling
    one, same = (engine.generate(PROMPT, max_tokens=15, seed=5).text for _ in range(2))
    assert one == same != engine.generate(PROMPT, max_tokens=15, seed=6).text
    greedy = engine.generate(PROMPT, max_tokens=15, temperature=0.0)
    likeliest = engine.generate(PROMPT, max_tokens=15, top_k=1, seed=1)
    assert greedy.text == likeliest.text
    with pytest.raises(TypeError, match="temprature"):
        engine.generate(PROMPT, temprature=0.0)


def test_text_and_tokens_agree(engine):
    answer = engine.generate(PROMPT, max_tokens=15, seed=5, logprobs=2)
    assert answer.text == engine.tokenizer.decode(chosen.token for chosen in answer.tokens)
    assert len(answer.tokens) == answer.stats.generated_tokens == 15
    assert answer.finish_reason == "max tokens"
    assert all(chosen.logprob <= chosen.top[0][1] <= 0 for chosen in answer.tokens)
    assert "".join(engine.stream(PROMPT, max_tokens=15, seed=5)) == answer.text


def test_a_stop_string_ends_the_text_before_it(engine):
    whole = engine.generate(PROMPT, max_tokens=30, temperature=0.0).text
    stop = whole[12:17]
    answer = engine.generate(PROMPT, max_tokens=30, temperature=0.0, stop=["never this", stop])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop string"
    assert answer.stats.stop_reason == "stop string"


def test_a_stop_string_that_ends_with_the_last_token_is_the_reason(engine):
    whole = engine.generate(PROMPT, max_tokens=8, temperature=0.0)
    answer = engine.generate(PROMPT, max_tokens=8, temperature=0.0, stop=[whole.text[-4:]])
    assert (answer.text, answer.finish_reason) == (whole.text[:-4], "stop string")


def test_an_answer_that_nobody_reads_is_not_worked_on(engine):
    engine.answering(MESSAGES)
    assert (engine.scheduler.active, engine.scheduler.waiting) == (0, 0)


def test_streams_may_be_read_in_turn(engine):
    """Whoever steps, everyone's tokens arrive: one waits while the other has the place."""
    options = {"max_tokens": 10, "temperature": 0.0}
    prompts = (PROMPT, "And")
    alone = [list(engine.stream(prompt, **options)) for prompt in prompts]
    assert list(zip(*(engine.stream(prompt, **options) for prompt in prompts), strict=True)) == list(
        zip(*alone, strict=True)
    )
    first = engine.stream(PROMPT, **options)
    begun = [next(first)]
    assert engine.generate("And", **options).text == "".join(alone[1])
    assert [*begun, *first] == alone[0]


def test_an_engine_belongs_to_one_thread(engine):
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="belongs to the thread"):
        pool.submit(engine.generate, PROMPT, max_tokens=2).result()


@pytest.mark.parametrize(
    "options",
    [{"seed": -1}, {"logprobs": -1}, {"logprobs": 101}, {"max_tokens": "3"}, {"max_tokens": -1}, {"temperature": "hot"},
     {"top_p": None}, {"top_k": 1.5}, {"stop": ""}, {"stop": ["a", ""]}],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_name(engine, options):
    with pytest.raises(InputError) as caught:
        engine.generate(PROMPT, **{"max_tokens": 2, **options})
    assert next(iter(options)) in caught.value.problem


def test_one_stop_string_need_not_be_a_list(engine):
    whole = engine.generate(PROMPT, max_tokens=8, temperature=0.0)
    assert engine.generate(PROMPT, max_tokens=8, temperature=0.0, stop=whole.text[4:7]).text == whole.text[:4]


def test_leaving_a_stream_ends_the_work(engine):
    for _ in engine.stream(PROMPT):
        break
    assert engine.scheduler.active == 0


def test_a_chat_is_what_its_pieces_are(engine):
    options = {"max_tokens": 20, "temperature": 0.0}
    reply = engine.chat(MESSAGES, **options)
    pieces = list(engine.chat_stream(MESSAGES, **options))
    assert reply["role"] == "assistant"
    assert reply["content"] == "".join(piece.text for piece in pieces)
    assert {piece.kind for piece in pieces} == {PieceKind.CONTENT}
    # The demo learnt empty thoughts only: it would close at once what the prompt opened.
    bans = {engine.tokenizer.encode(tag)[0]: -math.inf for tag in ("<think>", "</think>")}
    thoughts = engine.chat(MESSAGES, thinking=True, logit_bias=bans, **options)
    assert thoughts["reasoning_content"]
    assert not thoughts["content"]


def test_scores_are_the_log_probabilities_that_generating_reports(engine):
    answer = engine.generate(PROMPT, max_tokens=8, temperature=0.0, logprobs=0)
    found = engine.score(PROMPT, [chosen.token for chosen in answer.tokens])
    # Read as a prompt they meet other kernels than one by one: keys and values may round to the next bfloat16.
    np.testing.assert_allclose(found, [chosen.logprob for chosen in answer.tokens], rtol=0, atol=0.02)
    with pytest.raises(InputError, match="nothing to score"):
        engine.score(PROMPT, "")


def test_another_process_goes_on_from_a_session(demo, tmp_path):
    """Turn 2 reads only what follows, also from the file: here another engine, which shares nothing with the first."""
    first = Engine.load(demo, context=512)
    reply = first.chat(MESSAGES, max_tokens=20, temperature=0.0)
    messages = [*MESSAGES, reply, {"role": "user", "content": "And the land?"}]
    first.save_session(tmp_path / "talk", {"messages": messages})

    second = Engine.load(demo, context=512)
    assert second.load_session(tmp_path / "talk")["messages"] == messages
    told = []
    for engine in (second, first):
        answering = engine.answering(messages, max_tokens=20, temperature=0.0)
        told.append("".join(piece.text for piece in answering))
        stats = answering.generation.stats
        common = len(engine.dialogue.prompt(MESSAGES).tokens) + 19  # the answer but its last token, which is not run
        assert stats.reused_tokens == common
    assert told[0] == told[1]


def test_a_session_of_another_model_is_refused(engine, tiny, tmp_path):
    engine.generate(PROMPT, max_tokens=2)
    engine.save_session(tmp_path / "talk")
    with pytest.raises(InputError, match="session"):
        Engine.load(tiny).load_session(tmp_path / "talk")
