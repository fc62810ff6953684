"""Has the engine answer a conversation: shown as it comes, watched, stopped by Ctrl-C, and told of in figures."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mosaic.runtime.request import FinishReason, Request, Stats
from mosaic.runtime.terminal.conversation import Conversation, Message
from mosaic.runtime.terminal.display import Display
from mosaic.runtime.terminal.figures import Form, figure_text, live_text
from mosaic.runtime.terminal.interrupts import Interrupts
from mosaic.runtime.terminal.live import LiveLine
from mosaic.runtime.terminal.profile import Profile
from mosaic.runtime.terminal.progress import PromptBar
from mosaic.runtime.terminal.screen import note
from mosaic.runtime.text.dialogue import message_of
from mosaic.runtime.text.reply import Piece, ReplyReader

if TYPE_CHECKING:
    from mosaic.runtime.answering import Answering
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.ops.profiled import ProfiledOps
    from mosaic.runtime.request import Generation

AfterStep = Callable[["Generation"], object]


@dataclass(frozen=True)
class Reply:
    """An answer that was shown."""

    message: Message
    stats: Stats
    reason: FinishReason

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.reason is FinishReason.CANCELLED

    @property
    def full(self) -> bool:
        """Whether it ended with the context."""
        return self.reason is FinishReason.CONTEXT_FULL

    @property
    def unborn(self) -> bool:
        """Whether Ctrl-C ended it before anything was said."""
        return self.interrupted and not self.message["content"] and "reasoning_content" not in self.message


@dataclass(frozen=True)
class Manner:
    """How answers are given: strings that end them, how figures are shown, whether reasoning is."""

    stop: Sequence[str] = ()
    form: Form | None = None
    thinking: bool | None = None  # as Display has it
    quiet: bool = False  # show nothing of the answer
    profiled: "ProfiledOps | None" = None


class Asker:
    """Asks one engine, in one manner."""

    def __init__(self, engine: "Engine", manner: Manner) -> None:
        self._engine = engine
        self._manner = manner

    def __call__(self, conversation: Conversation) -> Reply:
        """The answer to what the user said last. InputError if there can be none."""
        pieces: list[Piece] = []
        display = None if self._manner.quiet else Display(sys.stdout, self._manner.thinking)
        watch = _Watch(self._engine, self._manner)
        with watch.interrupts:
            answering = self._answering(conversation, watch.after_step)
            generation = watch.generation = answering.generation
            self._engine.model.after_layer = watch.after_layer
            try:
                for piece in answering:
                    pieces.append(piece)
                    watch.bar.close()
                    if display:
                        display.show(piece, len(answering.chosen))
            except KeyboardInterrupt:
                pass  # within the prompt, or a second one: what came is what there is
            finally:
                self._engine.model.after_layer = _nothing
                self._engine.scheduler.cancel(generation)
                watch.close()
                if display:
                    display.end()
        assert generation.finish_reason
        self._report(generation.stats, watch)
        return Reply(message_of(pieces), generation.stats, generation.finish_reason)

    def _answering(self, conversation: Conversation, after_step: AfterStep) -> "Answering":
        from mosaic.runtime.answering import Answering

        settings, engine, stop = conversation.settings, self._engine, self._manner.stop
        limits: dict[str, Any] = {"max_tokens": settings.max_tokens, "seed": settings.seed}
        if not conversation.raw:
            return engine.answering(conversation.messages, thinking=settings.thinking, stop=stop, after_step=after_step,
                                    **limits, **settings.sampling)  # fmt: skip
        tokens = engine.tokenizer.encode(conversation.last or "")
        request = Request(tokens, replace(engine.defaults, **settings.sampling), **limits)
        return Answering(engine.scheduler, request, ReplyReader(engine.tokenizer, stop=stop), after_step)

    def _report(self, stats: Stats, watch: "_Watch") -> None:
        """Figures and notes after the answer, on standard error."""
        if stats.stop_reason == FinishReason.CONTEXT_FULL:
            note(f"note: the context of {self._engine.context:,} tokens is full")
        if watch.profile:
            print("", *watch.profile.lines(stats.decoded_tokens), sep="\n", file=sys.stderr)
        if self._manner.form is Form.JSON:
            figures = {**stats.as_dict(), "tuned": asdict(self._engine.tuned)}
            print(json.dumps(figures), file=sys.stderr, flush=True)
        elif self._manner.form:
            note(figure_text(stats.as_dict()))


class _Watch:
    """What is looked at while an answer is made."""

    def __init__(self, engine: "Engine", manner: Manner) -> None:
        self.interrupts = Interrupts()
        self.bar = PromptBar()
        self.profile = Profile(manner.profiled) if manner.profiled else None
        self.generation: Generation | None = None
        self._live = LiveLine() if manner.form is Form.LIVE else None
        self._scheduler = engine.scheduler

    def after_layer(self, done: int, layers: int) -> None:
        """Within a prompt, which can take long."""
        if self.generation and self.generation.piece:
            if self.interrupts.wanted:
                raise KeyboardInterrupt
            self.bar.layer_done(self.generation, done, layers)

    def after_step(self, generation: "Generation") -> None:
        """Between two tokens, where an answer can end and its state be kept."""
        read, total = generation.progress
        if self.profile and read == total:
            self.profile.prompt_read()
        if self._live:
            self._live.show(live_text(generation.stats.as_dict()))
        if self.interrupts.wanted:
            self._scheduler.cancel(generation)

    def close(self) -> None:
        """Give lines of the terminal back."""
        self.bar.close()
        if self._live:
            self._live.close()


def _nothing(done: int, layers: int) -> None:
    """Nobody is waiting."""
