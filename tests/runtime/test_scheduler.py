"""The scheduler: limits, figures, what later prompts reuse, and that nobody's company changes a token."""

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime import scheduler as scheduler_module
from mosaic.runtime.engine import Engine
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.request import FinishReason, Generation, Request, Stats
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.scheduler import Scheduler
from support.tiny_tokenizer import UNUSED

GREEDY = Sampling(temperature=0.0)
IDS = np.random.default_rng(2).integers(0, 256, 400).tolist()


def new_scheduler(folder: Path, stop: frozenset[int] = frozenset(), **options) -> Scheduler:
    """Without the model's stop tokens: random weights would meet one by chance."""
    made = Engine.load(folder, **options).scheduler
    made.stop = stop
    return made


@pytest.fixture
def scheduler(tiny) -> Scheduler:
    return new_scheduler(tiny)


def answer(
    scheduler: Scheduler, prompt: Sequence[int], count: int | None = 6, sampling: Sampling = GREEDY, **options
) -> tuple[list[int], Stats]:
    generation = scheduler.submit(Request(prompt, sampling, max_tokens=count, **options))
    return [chosen.token for chosen in scheduler.tokens(generation)], generation.stats


@pytest.fixture(scope="module")
def fresh(tiny):
    """What a scheduler without a past answers."""
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: Sequence[int], count: int = 6) -> list[int]:
        if (*prompt, count) not in known:
            known[*prompt, count] = answer(new_scheduler(tiny), prompt, count)[0]
        return known[*prompt, count]

    return tokens


# --- limits and figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
def test_max_tokens(scheduler, count):
    tokens, stats = answer(scheduler, IDS[:10], count)
    assert len(tokens) == count
    assert stats.stop_reason == "max tokens"
    assert stats.generated_tokens == count
    assert stats.decoded_tokens == count - 1  # the last one is not run


def test_no_token_may_be_asked_for(scheduler):
    assert answer(scheduler, IDS[:10], 0)[0] == []


def test_the_greedy_answer_is_the_likeliest_token_at_every_step(scheduler):
    """Against one pass over prompt and answer."""
    tokens, _ = answer(scheduler, IDS[:10], 6)
    model = scheduler.model
    logits = model.logits(model.hidden([*IDS[:10], *tokens], model.new_sequence()))
    assert logits[9:-1, :UNUSED].argmax(dim=-1).tolist() == tokens


@pytest.mark.parametrize("whose", ["model", "request"])
def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(tiny, fresh, whose):
    expected = fresh(IDS[:10], 12)
    position = next(i for i in range(3, 12) if expected[i] not in expected[:i])
    stop = frozenset({expected[position]})
    scheduler = new_scheduler(tiny, stop=stop if whose == "model" else frozenset())
    tokens, stats = answer(scheduler, IDS[:10], 12, stop_tokens=stop if whose == "request" else frozenset())
    assert tokens == expected[:position]
    assert stats.stop_reason == "stop token"
    assert stats.generated_tokens == stats.decoded_tokens == position


def test_a_stop_token_at_once_gives_an_empty_answer(tiny, fresh):
    tokens, stats = answer(new_scheduler(tiny, stop=frozenset(fresh(IDS[:10])[:1])), IDS[:10])
    assert tokens == []
    assert (stats.generated_tokens, stats.decoded_tokens, stats.stop_reason) == (0, 0, "stop token")


def test_prompt_and_answer_together_fit_the_context(tiny):
    """As --context says in its help, and as max_length means elsewhere."""
    tokens, stats = answer(new_scheduler(tiny, context=16), IDS[:10], None)
    assert 10 + len(tokens) == 16
    assert stats.stop_reason == "context full"


def test_a_prompt_that_fills_the_context_is_accepted(tiny):
    tokens, stats = answer(new_scheduler(tiny, context=16), IDS[:16], None)
    assert tokens == []
    assert stats.stop_reason == "context full"


def test_a_prompt_beyond_the_context_is_refused(tiny):
    with pytest.raises(InputError, match="does not fit the context") as caught:
        answer(new_scheduler(tiny, context=16), IDS[:17])
    assert "17" in caught.value.facts["found"]
    assert "16" in caught.value.facts["expected"]


@pytest.mark.parametrize(
    ("prompt", "word"), [([], "empty"), ([1, -1], "does not know"), ([1, UNUSED], "does not know")]
)
def test_what_is_no_prompt_is_refused(scheduler, prompt, word):
    answer(scheduler, IDS[:10])
    with pytest.raises(InputError, match=word):
        answer(scheduler, prompt)
    assert answer(scheduler, [*IDS[:10], 1, 2])[1].reused_tokens == 8  # nothing was lost


def test_padding_rows_are_never_chosen(scheduler):
    tokens, _ = answer(scheduler, IDS[:10], 40, Sampling(temperature=1e6), seed=0)
    assert max(tokens) < UNUSED
    assert len(set(tokens)) > 20  # nearly uniform; over all 512 rows, 40 draws below 261 happen once in 10^11


def test_the_same_seed_gives_the_same_answer(scheduler):
    answers = [answer(scheduler, IDS[:10], 8, Sampling(), seed=seed)[0] for seed in (3, 3, 4)]
    assert answers[0] == answers[1] != answers[2]


def test_figures_add_up(scheduler):
    _, first = answer(scheduler, IDS[:20])
    tokens, stats = answer(scheduler, [*IDS[:20], 1, 2, 3])
    figures = stats.as_dict()
    assert (first.prompt_tokens, first.reused_tokens) == (20, 0)
    assert (stats.prompt_tokens, stats.reused_tokens) == (23, 18)
    assert stats.generated_tokens == len(tokens) == 6
    assert stats.decoded_tokens == 5
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert figures["prefill_tok_s"] == pytest.approx(5 / stats.prefill_seconds, abs=0.01)
    assert figures["decode_tok_s"] == pytest.approx(5 / stats.decode_seconds, abs=0.01)
    assert figures["decode_gb_s"] == pytest.approx(
        5 * stats.weight_bytes_per_token / stats.decode_seconds / 1e9, abs=0.001
    )


def test_figures_of_nothing_are_zero():
    assert Stats().as_dict() == {
        "prompt_tokens": 0,
        "reused_tokens": 0,
        "generated_tokens": 0,
        "prefill_seconds": 0.0,
        "prefill_tok_s": 0.0,
        "decode_seconds": 0.0,
        "decode_tok_s": 0.0,
        "weight_bytes_per_token": 0,
        "decode_gb_s": 0.0,
        "stop_reason": "",
        "expert_hits": 0,
        "expert_misses": 0,
        "expert_hit_rate": 1.0,
        "device_expert_hits": 0,
        "device_bytes": 0,
        "disk_bytes": 0,
        "disk_gb_s": 0.0,
        "stall_seconds": 0.0,
        "read_ahead_experts": 0,
        "read_ahead_and_used": 0,
        "prefetch_recall": None,
        "major_faults": 0,
        "weights_ceiling_gb_s": None,
        "disk_ceiling_gb_s": None,
    }


def test_weight_bytes_per_token_are_those_of_the_shapes(scheduler):
    """MODEL-SPEC 4.3 for the tiny sizes: E4M3 a byte a weight and two a block, the others bfloat16."""

    def e4m3(rows: int, columns: int) -> int:
        return rows * columns + 2 * (rows // 128) * (columns // 128)

    hidden, vocab, moe, keys, values = 256, 512, 128, 4 * 32, 8 * 32
    attention = e4m3(4 * 2 * 64, hidden) + 2 * e4m3(2 * 64, hidden) + e4m3(hidden, 4 * 64)
    channels = 2 * keys + values
    delta = (
        e4m3(channels, hidden) + e4m3(values, hidden) + 2 * (8 * hidden * 2) + channels * 4 * 2 + e4m3(hidden, values)
    )
    expert = 2 * e4m3(moe, hidden) + e4m3(hidden, moe)
    feed_forward = 16 * hidden * 2 + 4 * expert + expert + hidden * 2  # router, routed, shared and its gate
    expected = 2 * attention + 2 * delta + 4 * feed_forward + vocab * hidden * 2
    assert answer(scheduler, IDS[:3], 1)[1].weight_bytes_per_token == expected


# --- what later prompts reuse -----------------------------------------------------------------------------------------


def test_a_second_turn_goes_on_from_the_end_of_the_answer(scheduler, fresh):
    prompt = IDS[:70]
    for turn in range(3):
        tokens, stats = answer(scheduler, prompt)
        assert tokens == fresh(prompt)
        assert stats.reused_tokens == (0 if turn == 0 else len(prompt) - 4)  # all but the last token and three more
        prompt = [*prompt, *tokens, *IDS[100 + 3 * turn : 103 + 3 * turn]]


def test_a_prompt_that_parts_within_the_last_answer_goes_on_from_its_prompt(scheduler, fresh):
    tokens, _ = answer(scheduler, IDS[:70])
    other = [*IDS[:70], *tokens[:3], (tokens[3] + 1) % 256, 5]
    found, stats = answer(scheduler, other)
    assert stats.reused_tokens == 68
    assert found == fresh(other)


def test_a_prompt_that_parts_after_a_boundary_goes_on_from_there(scheduler, fresh, monkeypatch):
    """The template opens the answer otherwise in the next turn: with the reasoning left out, for one."""
    answer(scheduler, IDS[:70], boundaries=[20, 66])
    calls = calls_of(scheduler, monkeypatch)
    other = [*IDS[:66], 7, 8, 9]
    found, stats = answer(scheduler, other, boundaries=[20, 66])
    assert stats.reused_tokens == 66
    assert calls[0] == 3
    assert found == fresh(other)


def test_asking_again_reads_only_what_opens_the_answer(scheduler, fresh):
    for turn in range(2):
        found, stats = answer(scheduler, IDS[:70], boundaries=[66])
        assert stats.reused_tokens == (0 if turn == 0 else 66)
        assert found == fresh(IDS[:70])


def test_an_edit_goes_back_to_the_nearest_earlier_state(scheduler, fresh):
    first, _ = answer(scheduler, IDS[:30], boundaries=[26])
    second = [*IDS[:30], *first, *IDS[200:230]]
    answer(scheduler, second, boundaries=[len(second) - 4])
    edited = [*IDS[:30], *first, *IDS[300:320]]
    found, stats = answer(scheduler, edited, boundaries=[len(edited) - 4])
    assert stats.reused_tokens == 35  # prompt and answer but its last token
    assert found == fresh(edited)


@pytest.mark.parametrize("prompt", [IDS[200:240], IDS[:10], IDS[:19], [IDS[0] + 1, *IDS[1:30]]], ids=len)
def test_another_prompt_starts_anew(scheduler, fresh, prompt):
    answer(scheduler, IDS[:20])
    found, stats = answer(scheduler, prompt)
    assert stats.reused_tokens == 0
    assert found == fresh(prompt)


@pytest.mark.parametrize("prompt", [IDS[:20], [*IDS[:19], 0, 1], IDS[:30]], ids=len)
def test_plain_text_may_come_again_or_go_on(scheduler, fresh, prompt):
    """It is kept as near its end as can be: at least two tokens are read again."""
    answer(scheduler, IDS[:20])
    found, stats = answer(scheduler, prompt)
    assert stats.reused_tokens == 18
    assert found == fresh(prompt)


def test_an_answer_left_half_read_is_no_harm(scheduler, fresh):
    stream = scheduler.run(Request(IDS[:20], GREEDY))
    said = [next(stream).token, next(stream).token]
    stream.close()
    assert scheduler.active == 0
    prompt = [*IDS[:20], *said, 9]
    found, stats = answer(scheduler, prompt)
    assert found == fresh(prompt)
    assert stats.reused_tokens == 21  # the second token was chosen and not yet run


def test_without_a_state_budget_nothing_is_reused(tiny):
    scheduler = new_scheduler(tiny, state_budget=0)
    answer(scheduler, IDS[:70])
    assert answer(scheduler, [*IDS[:70], 1, 2])[1].reused_tokens == 0


@pytest.mark.parametrize("kv", list(KVFormat))
def test_going_back_works_in_every_kv_format(tiny, kv):
    scheduler = new_scheduler(tiny, kv=kv)
    answer(scheduler, IDS[:70])
    prompt = [*IDS[:70], 1, 2]
    assert answer(scheduler, prompt)[0] == answer(new_scheduler(tiny, kv=kv), prompt)[0]


def test_keys_and_values_stay_within_the_context_and_a_page_of_each_kept_state(tiny):
    """Kept states give way: as many conversations as you like need no more than one."""
    scheduler = new_scheduler(tiny, context=256)
    most = 2 * (256 // 64)  # two attention layers
    for start in range(0, 200, 10):
        tokens, _ = answer(scheduler, IDS[start : start + 190], 60)
        assert len(tokens) == 60
        assert scheduler.model.pages_in_use <= most + 2 * 2 * len(scheduler.cache)
    assert len(scheduler.cache) > 0


# --- prompts in pieces ------------------------------------------------------------------------------------------------


def calls_of(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the tokens of the calls of model.hidden to come."""
    sizes: list[int] = []
    hidden = scheduler.model.hidden

    def recorded(ids, state):
        sizes.append(len(ids))
        return hidden(ids, state)

    monkeypatch.setattr(scheduler.model, "hidden", recorded)
    return sizes


def test_a_prompt_in_pieces_gives_the_same_tokens(tiny, monkeypatch, fresh):
    scheduler = new_scheduler(tiny)
    scheduler.piece = 16
    sizes = calls_of(scheduler, monkeypatch)
    found, _ = answer(scheduler, IDS[:145], 12)
    assert sizes[:10] == [16] * 8 + [15, 2]
    assert found == fresh(IDS[:145], 12)


def test_pieces_change_no_bit(tiny):
    """A token's log-probability tells every bit of the state before it."""

    def logprobs(piece: int) -> list[float | None]:
        scheduler = new_scheduler(tiny)
        scheduler.piece = piece
        return [chosen.logprob for chosen in scheduler.run(Request(IDS[:150], GREEDY, max_tokens=3, logprobs=0))]

    assert logprobs(16) == logprobs(1024)


# --- log-probabilities of the prompt ----------------------------------------------------------------------------------


def test_scores_of_a_prompt(scheduler):
    """Against one pass over it in float64."""
    scheduler.piece = 16
    generation = scheduler.submit(Request(IDS[:50], GREEDY, max_tokens=0, logprobs=2, score_prompt=True))
    assert list(scheduler.tokens(generation)) == []
    model = scheduler.model
    logits = model.logits(model.hidden(IDS[:50], model.new_sequence())).double()[:, :UNUSED].log_softmax(dim=-1)
    found = generation.prompt_scores
    assert found[0] is None
    assert [chosen.token for chosen in found[1:]] == IDS[1:50]
    expected = [row[token].item() for row, token in zip(logits, IDS[1:50], strict=False)]
    np.testing.assert_allclose([chosen.logprob for chosen in found[1:]], expected, rtol=0, atol=1e-5)
    assert [chosen.top[0][0] for chosen in found[1:]] == logits[:-1].argmax(dim=-1).tolist()


def test_what_is_scored_is_read_whole_and_not_kept(scheduler):
    answer(scheduler, IDS[:20])
    for _ in range(2):
        generation = scheduler.submit(Request(IDS[:30], GREEDY, max_tokens=0, logprobs=0, score_prompt=True))
        list(scheduler.tokens(generation))
        assert len(generation.prompt_scores) == 30
        assert generation.stats.reused_tokens == 0


# --- company ----------------------------------------------------------------------------------------------------------


def run_together(scheduler: Scheduler, requests: Sequence[Request]) -> list[Generation]:
    generations = [scheduler.submit(request) for request in requests]
    while scheduler.step():
        pass
    return generations


def tokens_of(generation: Generation) -> list[int]:
    return [chosen.token for chosen in generation.take()]


def test_company_changes_no_bit(tiny):
    """Greedy and sampled, short and long, some ending while others go on; with fewer places than requests, too.

    Log-probabilities tell every bit.
    """
    requests = [
        Request(IDS[start : start + length], sampling, seed=start, max_tokens=count, logprobs=0)
        for start, length, count, sampling in [
            (0, 5, 20, GREEDY), (40, 90, 7, GREEDY), (9, 33, 1, Sampling()), (100, 200, 12, Sampling()),
            (60, 2, 15, GREEDY), (0, 5, 20, Sampling(temperature=2)),
        ]
    ]  # fmt: skip
    alone = [list(new_scheduler(tiny).run(request)) for request in requests]
    for places in (2, 6):
        found = run_together(new_scheduler(tiny, parallel=places, state_budget=0), requests)
        assert [generation.take() for generation in found] == alone
        assert {generation.finish_reason for generation in found} == {FinishReason.MAX_TOKENS}


def test_places_are_not_exceeded_and_everyone_has_a_turn(tiny):
    scheduler = new_scheduler(tiny, parallel=2)
    generations = [scheduler.submit(Request(IDS[i : i + 5], GREEDY, max_tokens=3)) for i in range(5)]
    most = 0
    while scheduler.step():
        most = max(most, scheduler.active)
        assert scheduler.active + scheduler.waiting <= 5
    assert most == 2
    assert [len(generation.take()) for generation in generations] == [3] * 5


def test_a_long_prompt_does_not_stop_the_others(tiny, monkeypatch):
    monkeypatch.setattr(scheduler_module, "IN_COMPANY", 8)
    scheduler = new_scheduler(tiny, parallel=2)
    short = scheduler.submit(Request(IDS[:5], GREEDY, max_tokens=60))
    scheduler.step()
    long = scheduler.submit(Request(IDS[:300], GREEDY, max_tokens=2))
    while long.finish_reason is None and short.finish_reason is None:
        scheduler.step()
    assert short.stats.generated_tokens > 10


def test_who_is_cancelled_leaves_at_once(tiny, fresh):
    scheduler = new_scheduler(tiny, parallel=1)
    first, second, third = (scheduler.submit(Request(IDS[i : i + 10], GREEDY, max_tokens=6)) for i in range(3))
    scheduler.step()
    scheduler.cancel(second)
    scheduler.cancel(first)
    assert (scheduler.active, scheduler.waiting) == (0, 1)
    while scheduler.step():
        pass
    assert (first.finish_reason, second.finish_reason) == (FinishReason.CANCELLED, FinishReason.CANCELLED)
    assert tokens_of(third) == fresh(IDS[2:12])
    scheduler.cancel(third)  # over already: nothing happens
    assert third.finish_reason is FinishReason.MAX_TOKENS


def test_what_cannot_be_followed_ends_alone_and_holds_no_memory(tiny, fresh):
    """Memory is back at once, not when the garbage collector comes by."""

    class Exhausted:
        def __init__(self) -> None:
            self.left = 3

        def allowed(self) -> np.ndarray:
            self.left -= 1
            if not self.left:
                raise InputError("the grammar is too much", remedy="write a smaller one")
            return np.ones(UNUSED, bool)

        def advance(self, token: int) -> None:
            pass

    scheduler = new_scheduler(tiny, parallel=2, state_budget=0)
    gc.collect()
    gc.disable()
    try:
        other = scheduler.submit(Request(IDS[:10], GREEDY, max_tokens=6))
        refused = scheduler.submit(Request(IDS[:200], GREEDY, mask=Exhausted()))
        while scheduler.step():
            pass
        assert scheduler.model.pages_in_use == 0
    finally:
        gc.enable()
    assert (refused.finish_reason, refused.stats.generated_tokens) == (FinishReason.REFUSED, 2)
    assert "too much" in str(refused.error)
    assert tokens_of(other) == fresh(IDS[:10])


def test_a_failure_ends_all_that_run_and_no_other(tiny, fresh, monkeypatch):
    scheduler = new_scheduler(tiny, parallel=2)
    generations = [scheduler.submit(Request(IDS[i : i + 10], GREEDY, max_tokens=6)) for i in range(3)]
    for _ in range(4):
        scheduler.step()

    def changed() -> None:
        raise InputError("a shard changed", remedy="start again")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_check", changed)
        scheduler.step()
    while scheduler.step():
        pass
    assert [generation.finish_reason for generation in generations] == ["failed", "failed", "max tokens"]
    assert "a shard changed" in str(generations[0].error)
    assert tokens_of(generations[2]) == fresh(IDS[2:12])
    with pytest.raises(InputError, match="a shard changed"):
        list(scheduler.tokens(generations[0]))
