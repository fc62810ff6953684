"""An engine without a model, for tests of the server: its scheduler writes what a script says.

A script is what follows a prompt: token ids (ANY: the first that the mask allows), and between them an `InputError`
(the engine fails), or a `threading.Event` (nothing more comes until it is set). The tokenizer is that of the tiny
checkpoints, so a token id is a byte. The rules of the real scheduler hold: places, limits, stop tokens, masks,
log-probabilities.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.runtime.engine import Engine
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.grammar import Grammars
from mosaic.runtime.request import FinishReason, Generation, Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.text.dialogue import Dialogue
from mosaic.runtime.text.template import ChatTemplate
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.tuned import UNTUNED
from support.tiny_tokenizer import END_OF_TEXT, IM_END, write_tokenizer

ANY = -1


class RefusedError(InputError):
    """In a script: it is the request that cannot go on, not the engine."""


Step = int | InputError | threading.Event
Script = Callable[[Request], Iterable[Step]]

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}
{#- calls are written <function=NAME> #}"""


def says(text: str | bytes, *, ends: bool = True) -> Script:
    """The script that writes a text, and then the stop token."""
    tokens = [*(text.encode() if isinstance(text, str) else text), *([IM_END] if ends else [])]
    return lambda request: tokens


class ScriptedEngine:
    """What the server uses of an engine."""

    def __init__(self, folder: Path, *, places: int = 2, context: int = 4096, template: str = TEMPLATE) -> None:
        write_tokenizer(folder, 264)
        (folder / "chat_template.jinja").write_text(template)
        self.tokenizer = Tokenizer(folder)
        self._folder = folder
        self.defaults = Sampling(temperature=0.0)
        self.stop = frozenset({IM_END, END_OF_TEXT})
        self.context = context
        self.tuned = UNTUNED
        self.num_tokens = self.tokenizer.num_tokens
        self.scheduler = ScriptedScheduler(self.stop, places, context)

    _sampling = Engine._sampling  # for Engine.answering, which needs nothing else of a model

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self._folder)

    @cached_property
    def dialogue(self) -> Dialogue:
        return Dialogue(self.tokenizer, self.template)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.stop)


class _Cache:
    nbytes = 0

    def __len__(self) -> int:
        return 0


class ScriptedScheduler:
    """`script` may be changed at any time; `requests` are all that were submitted, `most` the most in work at once."""

    def __init__(self, stop: frozenset[int], places: int, context: int) -> None:
        self.script: Script = says("Hello, world.")
        self.requests: list[Request] = []
        self.cancelled = 0
        self.most = 0
        self.reused = 0  # tokens of every prompt said to be known
        self.traffic = Traffic(hits=3, misses=1, disk_bytes=4096)
        self.cache = _Cache()
        self._stop = stop
        self._places = places
        self._context = context
        self._waiting: deque[Generation] = deque()
        self._running: dict[Generation, deque[Step]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> Generation:
        assert 0 < len(request.prompt) <= self._context
        generation = Generation(request)
        self.requests.append(request)
        self._waiting.append(generation)
        return generation

    def withdraw(self, generation: Generation) -> None:
        if generation in self._waiting:
            self._waiting.remove(generation)

    def cancel(self, generation: Generation, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.cancelled += generation.finish_reason is None
        if generation in self._waiting:
            self._waiting.remove(generation)
        self._end(generation, reason)

    def step(self) -> bool:
        while self._waiting and self.active < self._places:
            generation = self._waiting.popleft()
            self._running[generation] = deque(self.script(generation.request))
            self._read(generation)
        self.most = max(self.most, self.active)
        for generation, script in list(self._running.items()):
            self._advance(generation, script)
        time.sleep(0)
        return bool(self._running or self._waiting)

    def _read(self, generation: Generation) -> None:
        request = generation.request
        generation.stats.reused_tokens = self.reused
        generation.prompt_done = len(request.prompt)
        if request.score_prompt:
            generation.prompt_scores = [None, *(self._chosen(request, token) for token in request.prompt[1:])]
        if request.max_tokens == 0:
            self._end(generation, FinishReason.MAX_TOKENS)

    def _advance(self, generation: Generation, script: deque[Step]) -> None:
        request = generation.request
        if not script:
            return self._end(generation, FinishReason.CONTEXT_FULL)
        if isinstance(script[0], threading.Event) and not script[0].wait(0.001):
            return None
        step = script.popleft()
        if isinstance(step, InputError):
            reason = FinishReason.REFUSED if isinstance(step, RefusedError) else FinishReason.FAILED
            return self._end(generation, reason, step)
        if isinstance(step, threading.Event):
            return None
        if request.mask:
            allowed = request.mask.allowed()
            step = int(allowed.argmax()) if step == ANY else step
            assert allowed[step], chr(step)
            request.mask.advance(step)
        if step in self._stop or step in request.stop_tokens:
            generation.ended_by = self._chosen(request, step)
            return self._end(generation, FinishReason.STOP_TOKEN)
        generation.add(self._chosen(request, step))
        if generation.stats.generated_tokens == request.max_tokens:
            return self._end(generation, FinishReason.MAX_TOKENS)
        return None

    def _chosen(self, request: Request, token: int) -> Chosen:
        """A token is as likely as its number says, and so are the alternatives: the next ones."""
        if request.logprobs is None:
            return Chosen(token)
        top = tuple((token + n, -(token + n) / 100) for n in range(request.logprobs))
        return Chosen(token, -token / 100, top)

    def _end(self, generation: Generation, reason: FinishReason, error: InputError | None = None) -> None:
        self._running.pop(generation, None)
        generation.finish(reason, error)
