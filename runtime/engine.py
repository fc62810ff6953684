"""The Python interface: a model directory, loaded and ready to answer.

    from mosaic.runtime import Engine

    engine = Engine.load("qwen-mosaic", ram="8GiB")
    print(engine.generate("Once upon a time", max_tokens=40).text)
    for text in engine.stream("Once upon a time", max_tokens=40):
        print(text, end="", flush=True)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    print(engine.chat(messages)["content"])
    print(sum(engine.score("The capital of France is", " Paris")))

An engine belongs to the thread that uses it first. What runs several requests at a time is `engine.scheduler`, and
mosaic-serve.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import CONFIG_FILE
from mosaic.recipes import cache_folder
from mosaic.runtime import session_file
from mosaic.runtime.answering import Answering
from mosaic.runtime.device import Device
from mosaic.runtime.device.choice import device_beside
from mosaic.runtime.grammar import Grammars
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loaded, Loading, LoadOptions
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option
from mosaic.runtime.ops.cpu import threads as ops_threads
from mosaic.runtime.plan import LEAST_KEPT
from mosaic.runtime.prefixes import StateCache
from mosaic.runtime.progress import Progress, silent
from mosaic.runtime.request import Generation, Request, Stats
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.sampling import Sampling, generation_defaults, stop_tokens
from mosaic.runtime.scheduler import Scheduler
from mosaic.runtime.session_layout import Identity
from mosaic.runtime.sizes import parse_size
from mosaic.runtime.speeds import known_speeds
from mosaic.runtime.text.dialogue import Dialogue, message_of
from mosaic.runtime.text.reply import Piece, ReplyReader
from mosaic.runtime.text.template import ChatTemplate
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.tuned import Tuned, known_tuning, settle_threads
from mosaic.runtime.wishes import VramWishes

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """A text that was generated. `finish_reason`: as in FinishReason. `tokens` are all that were chosen."""

    text: str
    tokens: list[Chosen]
    finish_reason: str
    stats: Stats


class Engine:
    """A model that is ready to answer. Made by `Engine.load`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, loading: Loading, loaded: Loaded) -> None:
        self.folder = folder
        self.model = loaded.model
        self.tokenizer = tokenizer
        recommended = generation_defaults(folder)
        self.defaults: Sampling = recommended.sampling
        self.stop: frozenset[int] = recommended.stop | _config_stop(folder)
        self.context: int = loading.plan.context
        self.tuned: Tuned = loading.tuned
        self.num_tokens = min(self.tokenizer.num_tokens, loaded.model.spec.vocab_size)
        self._identity = Identity.of(loading.weights.catalog, loaded.model.kv)
        self.scheduler = Scheduler(
            loaded.model,
            num_tokens=self.num_tokens,
            stop=self.stop,
            context=self.context,
            places=loading.parallel,
            cache=StateCache(loading.plan.kept),
            traffic=loaded.traffic,
            piece=loading.piece,
            check=loaded.check,
            ceilings=known_speeds(*loading.spans, ops_threads()),
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        ram: int | str | None = None,
        context: int | None = None,
        kv: str = "bf16",
        parallel: int = 1,
        state_budget: int | str | None = None,
        device: Device | str = "auto",
        vram: int | str | None = None,
        gpu_layers: int | None = None,
        ops: Ops | str = "cpu",
        activations: str = "f32",
        threads: int | None = None,
        options: LoadOptions | None = None,
        progress: Progress = silent,
    ) -> "Engine":
        """A model directory, made ready within `ram` (bytes, or as "8GiB"; by default what is free).

        `context`: most tokens of prompt and answer together; by default the model's, or what memory allows. `kv`: f32,
        bf16 or e4m3. `parallel`: sequences at a time. `state_budget`: memory for states that later prompts go on from.
        `device`: cpu, cuda, cuda:N, or auto, a GPU if there is one that can be used; `vram`: its memory for experts;
        `gpu_layers`: how many layers lie there. `threads`, and what is not said of the device: as `mosaic-run --tune`
        found it to be fastest, or else all cores and what fits; of `ops` that are not a name, as they are.
        `progress` is told of bytes that are read. InputError for whatever is not as it should be.
        """
        folder = Path(folder).expanduser()
        for name, value, least in (("threads", threads, 1), ("parallel", parallel, 1), ("gpu_layers", gpu_layers, 0)):
            _check_whole(name, value, least)
        by_name = isinstance(ops, str)
        if isinstance(ops, str):
            ops = make_ops(option("ops", ops, OpsName), option("activations", activations, Activations), threads)
        wishes = VramWishes(_nbytes("vram", vram), gpu_layers)
        chosen = device_beside(ops, device, used=wishes != VramWishes())
        tuned = known_tuning(read_catalog(folder), chosen.name)
        tuned = settle_threads(ops, threads, tuned) if by_name else replace(tuned, threads=None)
        loading = Loading(
            folder,
            option("kv", kv, KVFormat),
            context=context,
            ram=_nbytes("ram", ram),
            parallel=parallel,
            state_budget=_nbytes("state_budget", state_budget),
            chosen=chosen,
            vram=wishes,
            tuned=tuned,
        )
        tokenizer = Tokenizer(folder)  # before the weights: it may be refused, and what it takes is planned for
        return cls(folder, tokenizer, loading, loading.load(ops, options or LoadOptions(), progress))

    @property
    def model_name(self) -> str:
        """What the model is called: the name of its directory, or demo."""
        folder = self.folder.resolve()
        return "demo" if folder.parent == cache_folder().resolve() else folder.name

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template; InputError if it has none."""
        return ChatTemplate(self.folder)

    @cached_property
    def dialogue(self) -> Dialogue:
        """Turns messages into prompts, and tokens into replies."""
        return Dialogue(self.tokenizer, self.template)

    @cached_property
    def grammars(self) -> Grammars:
        """Makes masks that keep an answer within a grammar."""
        return Grammars(self.tokenizer, self.stop)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        logprobs: int | None = None,
        **sampling: Any,
    ) -> Answer:
        """The text that follows `prompt`.

        `stop`: strings that end it, and are not part of it. `logprobs`: report the log-probability of each token, and
        of so many of the likeliest. `sampling`: fields of Sampling that differ from the model's defaults.
        """
        answering = self._continue(prompt, max_tokens, stop, seed, logprobs, sampling)
        text = "".join(piece.text for piece in answering)
        return _answer(text, answering)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The same text as it comes. Closing the iterator ends the work."""
        for piece in self._continue(prompt, max_tokens, stop, seed, None, sampling):
            yield piece.text

    def chat(self, messages: Messages, **options: Any) -> dict[str, Any]:
        """The assistant's next message: role, content, reasoning_content, tool_calls, as the OpenAI API has them.

        `options`: as of `answering`.
        """
        return message_of(list(self.chat_stream(messages, **options)))

    def chat_stream(self, messages: Messages, **options: Any) -> Iterator[Piece]:
        """Pieces of the assistant's next message: reasoning, content, tool calls. Closing the iterator ends the work.

        `options`: as of `answering`.
        """
        yield from self.answering(messages, **options)

    def answering(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        after_step: Callable[[Generation], object] = lambda generation: None,
        **sampling: Any,
    ) -> Answering:
        """What `chat_stream` iterates, with the generation's figures.

        `messages`, `tools`: as the OpenAI API has them. `thinking`: on or off where the template knows; None: as it
        likes. `after_step` is told of the generation after every step. `stop`, `seed`, `sampling`: as of `generate`.
        """
        prompt = self.dialogue.prompt(messages, tools, thinking)
        request = Request(
            prompt.tokens,
            self._sampling(sampling),
            seed=seed,
            max_tokens=max_tokens,
            boundaries=prompt.boundaries,
        )
        return Answering(self.scheduler, request, self.dialogue.reader(prompt, _strings(stop), tools), after_step)

    def score(self, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> list[float]:
        """Log-probabilities, in nats, of the tokens of `continuation` after `prompt`. Both have at least one token.

        They are tokenised apart, so that the sum is that of exactly these tokens.
        """
        first, second = self._tokens(prompt), self._tokens(continuation)
        if not first or not second:
            raise InputError(
                "nothing to score",
                found=f"{len(first)} tokens of prompt, {len(second)} of continuation",
                expected="at least one of each",
                remedy="give more text",
            )
        request = Request([*first, *second], self.defaults, max_tokens=0, logprobs=0, score_prompt=True)
        generation = self.scheduler.submit(request)
        list(self.scheduler.tokens(generation))
        return [
            scored.logprob for scored in generation.prompt_scores[len(first) :] if scored and scored.logprob is not None
        ]

    def save_session(self, file: str | Path, document: Mapping[str, Any] | None = None) -> None:
        """Write what is remembered of prompts and answers, so that another process can go on from there.

        That is the states used last, where a prompt's last message ends and where its answer does, not all that are
        kept. `document`: anything JSON that belongs to it, the messages for one.
        """
        states = self.scheduler.cache.items()[-LEAST_KEPT:]
        session_file.save(Path(file), self._identity, states, dict(document or {}))

    def load_session(self, file: str | Path) -> dict[str, Any]:
        """Remember what `save_session` wrote; its document. InputError if it is of another model, or damaged."""
        cache, make_room = self.scheduler.cache, self.scheduler.make_room
        states, document = session_file.load(
            Path(file), self._identity, self.model, cache.budget, self.context, make_room
        )
        for tokens, snapshot in states:
            cache.put(tokens, snapshot)
        return document

    def _continue(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None,
        stop: str | Sequence[str],
        seed: int | None,
        logprobs: int | None,
        sampling: Mapping[str, Any],
    ) -> Answering:
        request = Request(
            self._tokens(prompt), self._sampling(sampling), seed=seed, max_tokens=max_tokens, logprobs=logprobs
        )
        return Answering(self.scheduler, request, ReplyReader(self.tokenizer, stop=_strings(stop)))

    def _sampling(self, changes: Mapping[str, Any]) -> Sampling:
        if unknown := changes.keys() - {field.name for field in fields(Sampling)}:
            raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
        return replace(self.defaults, **changes)

    def _tokens(self, text: str | Sequence[int]) -> Sequence[int]:
        return self.tokenizer.encode(text) if isinstance(text, str) else text


def _strings(stop: str | Sequence[str]) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop


def _answer(text: str, answering: Answering) -> Answer:
    generation = answering.generation
    assert generation.finish_reason
    return Answer(text, answering.chosen, generation.finish_reason, generation.stats)


def _check_whole(name: str, value: object, least: int) -> None:
    """InputError for what is neither None nor a whole number of at least so much."""
    if value is not None and (type(value) is not int or value < least):
        remedy = "give one, or leave it out"
        raise InputError(
            f"{name} is out of range", found=repr(value), expected=f"a whole number from {least} on", remedy=remedy
        )


def _nbytes(name: str, size: int | str | None) -> int | None:
    nbytes = parse_size(name, size) if isinstance(size, str) else size
    _check_whole(name, nbytes, 0)
    return nbytes


def _config_stop(folder: Path) -> frozenset[int]:
    """Stop tokens that config.json names beside generation_config.json."""
    config = read_json(folder / CONFIG_FILE)
    return stop_tokens(config.get("text_config", config), folder / CONFIG_FILE)
