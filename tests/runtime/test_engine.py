"""The engine: limits, figures, and that whatever an engine has been through, it answers as a fresh one would."""

import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
import torch

from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError
from mosaic.runtime import conversation as conversation_module
from mosaic.runtime import engine as engine_module
from mosaic.runtime import state as state_module
from mosaic.runtime.engine import Engine, Stats, load_engine
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.state import KVCache, KVFormat, KVPool, SequenceState
from support.tiny_tokenizer import END_OF_TEXT, IM_END, UNUSED

GREEDY = Sampling(temperature=0.0)
IDS = np.random.default_rng(2).integers(0, 256, 400).tolist()


def new_engine(folder: Path, stop: frozenset[int] = frozenset(), **options) -> Engine:
    """Without stop tokens: random weights would meet one by chance."""
    made = load_engine(folder, options.pop("ops", None) or CpuOps(), **options)
    made.stop = stop
    return made


@pytest.fixture
def engine(tiny) -> Engine:
    return new_engine(tiny)


def answer(
    engine: Engine, prompt: Sequence[int], count: int | None = 6, sampling: Sampling = GREEDY, seed: int | None = None
) -> tuple[list[int], Stats]:
    stats = Stats()
    return list(engine.generate(prompt, sampling, seed, count, stats)), stats


@pytest.fixture(scope="module")
def fresh(tiny):
    """What an engine without a past answers."""
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: Sequence[int], count: int = 6) -> list[int]:
        if (*prompt, count) not in known:
            known[*prompt, count] = answer(new_engine(tiny), prompt, count)[0]
        return known[*prompt, count]

    return tokens


# --- limits and figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
def test_max_tokens(engine, count):
    tokens, stats = answer(engine, IDS[:10], count)
    assert len(tokens) == count
    assert stats.stop_reason == "max tokens"
    assert stats.generated_tokens == count
    assert stats.decoded_tokens == count - 1  # the last one is not run


def test_the_greedy_answer_is_the_likeliest_token_at_every_step(engine):
    """Against one pass over prompt and answer."""
    tokens, _ = answer(engine, IDS[:10], 6)
    model = engine.model
    logits = model.logits(model.hidden([*IDS[:10], *tokens], model.new_sequence()))
    assert logits[9:-1, :UNUSED].argmax(dim=-1).tolist() == tokens


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(tiny, fresh):
    expected = fresh(IDS[:10], 12)
    position = next(i for i in range(3, 12) if expected[i] not in expected[:i])
    engine = new_engine(tiny, stop=frozenset({expected[position]}))
    tokens, stats = answer(engine, IDS[:10], 12)
    assert tokens == expected[:position]
    assert stats.stop_reason == "stop token"
    assert stats.generated_tokens == stats.decoded_tokens == position


def test_a_stop_token_at_once_gives_an_empty_answer(tiny, fresh):
    engine = new_engine(tiny, stop=frozenset(fresh(IDS[:10])[:1]))
    tokens, stats = answer(engine, IDS[:10])
    assert tokens == []
    assert (stats.generated_tokens, stats.decoded_tokens, stats.stop_reason) == (0, 0, "stop token")


def test_the_stop_tokens_are_those_of_both_files(tiny):
    """Of the text_config and of generation_config.json."""
    assert load_engine(tiny, CpuOps()).stop == {IM_END, END_OF_TEXT}


def test_the_answer_ends_when_the_context_is_full(tiny):
    engine = new_engine(tiny, context=16)
    tokens, stats = answer(engine, IDS[:10], None)
    assert stats.stop_reason == "context full"
    assert len(engine._conversation.tokens) <= 16
    assert len(tokens) >= 6


def test_prompt_and_answer_together_fit_the_context(tiny):
    """As --context says in its help, and as max_length means elsewhere."""
    tokens, _ = answer(new_engine(tiny, context=16), IDS[:10], None)
    assert 10 + len(tokens) == 16


def test_a_prompt_that_fills_the_context_is_accepted(tiny):
    _, stats = answer(new_engine(tiny, context=16), IDS[:16], None)
    assert stats.stop_reason == "context full"


def test_a_prompt_beyond_the_context_is_refused(tiny):
    engine = new_engine(tiny, context=16)
    with pytest.raises(InputError, match="does not fit the context") as caught:
        answer(engine, IDS[:17])
    assert "17" in caught.value.facts["found"]
    assert "16" in caught.value.facts["expected"]


def test_an_empty_prompt_is_refused(engine):
    with pytest.raises(InputError, match="prompt is empty"):
        answer(engine, [])


def test_a_refused_prompt_leaves_the_conversation_alone(engine):
    answer(engine, IDS[:10])
    with pytest.raises(InputError):
        answer(engine, [])
    assert answer(engine, [*IDS[:10], 1])[1].reused_tokens == 10


@pytest.mark.parametrize("context", [0, -1, 4097])
def test_a_context_the_model_does_not_have_is_refused(tiny, context):
    with pytest.raises(InputError, match="--context") as caught:
        load_engine(tiny, CpuOps(), context=context)
    assert caught.value.facts["found"] == str(context)


def test_the_context_is_the_models_own_unless_given(tiny):
    assert load_engine(tiny, CpuOps()).context == 4096
    assert load_engine(tiny, CpuOps(), context=4096).context == 4096
    assert load_engine(tiny, CpuOps(), context=1).context == 1


def test_padding_rows_are_never_chosen(engine):
    tokens, _ = answer(engine, IDS[:10], 40, Sampling(temperature=1e6), seed=0)
    assert max(tokens) < UNUSED
    assert len(set(tokens)) > 20  # nearly uniform; over all 512 rows, 40 draws below 261 happen once in 10^11


def test_the_same_seed_gives_the_same_answer(engine):
    answers = [answer(engine, IDS[:10], 8, Sampling(), seed)[0] for seed in (3, 3, 4)]
    assert answers[0] == answers[1] != answers[2]


def test_figures_add_up(engine):
    _, first = answer(engine, IDS[:20])
    tokens, stats = answer(engine, [*IDS[:20], 1, 2, 3])
    figures = stats.as_dict()
    assert (first.prompt_tokens, first.reused_tokens) == (20, 0)
    assert (stats.prompt_tokens, stats.reused_tokens) == (23, 20)
    assert stats.generated_tokens == len(tokens) == 6
    assert stats.decoded_tokens == 5
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert figures["prefill_tok_s"] == pytest.approx(3 / stats.prefill_seconds, abs=0.01)
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


def test_weight_bytes_per_token_are_those_of_the_shapes(engine):
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
    assert answer(engine, IDS[:3], 1)[1].weight_bytes_per_token == expected


# --- what the next turn uses ------------------------------------------------------------------------------------------


def test_a_second_turn_reuses_the_state_and_answers_as_a_fresh_engine(engine, fresh):
    prompt = IDS[:70]
    for turn in range(3):
        tokens, stats = answer(engine, prompt)
        assert tokens == fresh(prompt)
        assert stats.reused_tokens == (0 if turn == 0 else len(prompt) - 4)  # all but the last token and three more
        prompt = [*prompt, *tokens, *IDS[100 + 3 * turn : 103 + 3 * turn]]


def test_a_prompt_that_parts_within_the_last_answer_goes_back_to_its_prompt(engine, fresh):
    tokens, _ = answer(engine, IDS[:70])
    other = [*IDS[:70], *tokens[:3], (tokens[3] + 1) % 256, 5]
    found, stats = answer(engine, other)
    assert stats.reused_tokens == 70
    assert found == fresh(other)


def test_going_back_twice_is_going_back_to_the_newest_prompt(engine, fresh):
    first, _ = answer(engine, IDS[:10])
    second = [*IDS[:10], *first, 7]
    tokens, _ = answer(engine, second)
    third = [*second, (tokens[0] + 1) % 256]
    found, stats = answer(engine, third)
    assert stats.reused_tokens == len(second)
    assert found == fresh(third)


@pytest.mark.parametrize(
    "prompt", [IDS[200:240], IDS[:10], IDS[:19], IDS[:20], [*IDS[:19], 0, 1], [IDS[0] + 1, *IDS[1:30]]], ids=len
)
def test_another_prompt_starts_anew(engine, fresh, prompt):
    answer(engine, IDS[:20])
    found, stats = answer(engine, prompt)
    assert stats.reused_tokens == 0
    assert found == fresh(prompt)


def test_an_answer_left_half_read_is_no_harm(engine, fresh):
    stream = engine.generate(IDS[:20], GREEDY, None, 6, Stats())
    said = [next(stream), next(stream)]
    stream.close()
    prompt = [*IDS[:20], *said, 9]
    found, stats = answer(engine, prompt)
    assert found == fresh(prompt)
    assert stats.reused_tokens == 21  # the second token was chosen and not yet run


@pytest.mark.parametrize("kv", list(KVFormat))
def test_going_back_works_in_every_kv_format(tiny, kv):
    engine = new_engine(tiny, kv=kv)
    answer(engine, IDS[:70])
    prompt = [*IDS[:70], 1, 2]
    assert answer(engine, prompt)[0] == answer(new_engine(tiny, kv=kv), prompt)[0]


def test_many_conversations_need_no_more_pages_than_one(engine):
    answer(engine, IDS[:130])
    pool = next(layer for layer in engine._conversation._state.layers if isinstance(layer, KVCache))._pool
    pages = len(pool._pages)
    for start in (5, 10, 15):
        answer(engine, IDS[start : start + 130], 2)
    assert len(pool._pages) == pages


# --- prefill in pieces ------------------------------------------------------------------------------------------------


def pieces_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the sizes of the calls of model.hidden to come."""
    sizes: list[int] = []
    hidden = engine.model.hidden

    def recorded(ids, state):
        sizes.append(len(ids))
        return hidden(ids, state)

    monkeypatch.setattr(engine.model, "hidden", recorded)
    return sizes


def test_prefill_in_pieces_equals_one_piece(tiny, monkeypatch):
    """float64 throughout, but a KV entry near a rounding boundary may fall to either side: 2^-24 of it in f32."""
    expected = new_engine(tiny, kv=KVFormat.F32)._prefill(IDS[:150])
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 16)
    engine = new_engine(tiny, kv=KVFormat.F32)
    sizes = pieces_of(engine, monkeypatch)
    found = engine._prefill(IDS[:150])
    assert sizes == [16] * 9 + [6]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_pieces_begin_at_multiples_of_the_chunk(tiny, monkeypatch):
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 16)
    engine = new_engine(tiny)
    sizes = pieces_of(engine, monkeypatch)
    answer(engine, IDS[:21], 1)
    assert sizes == [16, 5]
    sizes.clear()
    answer(engine, IDS[:64], 1)  # 21 are known; 11 to the next multiple; the last piece is whole
    assert sizes == [11, 16, 16]
    sizes.clear()
    answer(engine, IDS[:65], 1)
    assert sizes == [1]


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call", [0, 1, 2, 4])
def test_after_an_interruption_of_the_model_it_answers_as_a_fresh_engine(tiny, fresh, monkeypatch, call, error):
    """Calls 0 and 1 are pieces of the prompt, 2 and 4 tokens of the answer. The state is left half advanced."""
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 16)
    engine = new_engine(tiny)
    hidden, count = engine.model.hidden, 0

    def failing(ids, state):
        nonlocal count
        count += 1
        result = hidden(ids, state)
        if count == call + 1:
            raise error
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "hidden", failing)
        with pytest.raises(error):
            answer(engine, IDS[:20])
    for prompt in ([*IDS[:20], 3], IDS[:20]):
        assert answer(engine, prompt)[0] == fresh(prompt)


class Rememberer:
    """Stands for the model: each token follows from everything that a real SequenceState holds, and costs no time."""

    nbytes_per_token = 1

    def __init__(self, spec) -> None:
        self.spec = spec
        self._pool = KVPool(1, 1, KVFormat.F32)

    def new_sequence(self) -> SequenceState:
        return SequenceState(self.spec, self._pool)

    def hidden(self, ids: Sequence[int], state: SequenceState) -> torch.Tensor:
        held: list[object] = []
        for layer in state.layers:
            if isinstance(layer, KVCache):
                rows = torch.tensor(ids).float().view(-1, 1, 1)
                layer.append(rows, rows)
                held.append(layer.read()[0].flatten().tolist())
            else:
                digest = zlib.crc32(repr((layer.recurrent.flatten()[0].item(), layer.position, list(ids))).encode())
                for token in ids:
                    digest = zlib.crc32(repr((layer.recurrent.flatten()[0].item(), layer.position, token)).encode())
                    layer.recurrent = torch.tensor([digest], dtype=torch.float64)
                    layer.position += 1
                held.append(digest)
        state.length += len(ids)
        return torch.tensor([[zlib.crc32(repr((held, state.length)).encode())]] * len(ids), dtype=torch.float64)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(hidden[-1].item()))
        return torch.rand(1, self.spec.vocab_size, generator=generator)


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line run in engine.py, conversation.py or state.py, as Ctrl-C can."""

    def __init__(self, line: int) -> None:
        self._left = line
        self.where = ""

    def __enter__(self) -> "InterruptAt":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object):
        own = frame.f_code.co_filename in (engine_module.__file__, conversation_module.__file__, state_module.__file__)
        return self._line if own else None

    def _line(self, frame: FrameType, event: str, argument: object):
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


FIRST = IDS[:6]


@pytest.mark.parametrize("kind", ["extends", "parts", "other"])
def test_ctrl_c_at_any_line_leaves_an_engine_that_answers_as_a_fresh_one(tiny, kind):
    spec = read_catalog(tiny).spec

    def new() -> Engine:
        return Engine(Rememberer(spec), SimpleNamespace(num_tokens=UNUSED), GREEDY, frozenset(), 4096)

    first, _ = answer(new(), FIRST, 3)
    second = {  # goes on from the state, goes back to the snapshot, starts anew
        "extends": [*FIRST, *first, 7, 8],
        "parts": [*FIRST, first[0], first[1] + 1, 9],
        "other": IDS[50:57],
    }[kind]
    said, _ = answer(new(), second, 3)
    afterwards = ([*second, *said, 1], [*second, 2], [*FIRST, *first, 3], [*FIRST, 4])
    expected = [answer(new(), prompt, 2)[0] for prompt in afterwards]
    wrong: set[str] = set()
    line = 0
    while True:
        line += 1
        interrupt = None
        for prompt, wanted in zip(afterwards, expected, strict=True):
            engine = new()
            answer(engine, FIRST, 3)
            interrupt = InterruptAt(line)
            try:
                with interrupt:
                    answer(engine, second, 3)
            except KeyboardInterrupt:
                pass
            try:
                right = answer(engine, prompt, 2)[0] == wanted
            except (AssertionError, IndexError, RuntimeError):
                right = False
            if not right:
                wrong.add(interrupt.where)
        if not interrupt.where:
            break
    assert line > 60  # the prompt and three tokens: fewer would mean that nothing was traced
    assert not wrong, f"interrupted before these lines, the next answer is wrong: {sorted(wrong)}"
