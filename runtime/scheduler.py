"""Runs several requests over one model at a time: a piece of a prompt, then a token of each answer, and so on.

One thread, no I/O. On the CPU's kernels what runs beside a request changes none of its tokens. States that later
prompts may begin with are kept: where the last message of a prompt ends, and where an answer ends.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mosaic.format.errors import InputError
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.machine import major_faults
from mosaic.runtime.model import HybridModel, Row
from mosaic.runtime.prefill import IN_COMPANY, PREFILL_CHUNK, SHORTEST, next_cut
from mosaic.runtime.prefixes import StateCache
from mosaic.runtime.prompt_scores import scores_of
from mosaic.runtime.request import FinishReason, Generation, Request
from mosaic.runtime.running import Running
from mosaic.runtime.sampler import Chosen, Sampler
from mosaic.runtime.speeds import Speeds


class Scheduler:
    """Requests over a model.

    `places`: sequences in work at a time, each of at most `context` tokens; further requests wait their turn.
    `num_tokens`: ids from here on are padding of the head. `stop`: tokens that end every text.
    `piece`: most tokens of a prompt that are read at a time.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        num_tokens: int,
        stop: frozenset[int],
        context: int,
        places: int,
        cache: StateCache,
        traffic: Callable[[], Traffic] = Traffic,
        check: Callable[[], None] = lambda: None,
        ceilings: Speeds | None = None,
        piece: int = PREFILL_CHUNK,
    ) -> None:
        self.model = model
        self.stop = stop
        self.context = context
        self.cache = cache
        self._num_tokens = num_tokens
        self._places = places
        self._traffic = traffic
        self._check = check
        self._ceilings = ceilings
        self.piece = piece
        self._most_pages = places * model.pages(context)
        self._waiting: deque[tuple[Generation, Sampler]] = deque()
        self._reading: deque[Running] = deque()  # whoever is first reads the next piece of its prompt
        self._answering: list[Running] = []
        self._sound = True  # False while states and tokens may disagree
        self._thread = 0  # whose it is: that of the first who uses it
        self._debt = 0.0  # seconds that prompts have had while answers waited, and answers have not had back

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Requests in work."""
        return len(self._reading) + len(self._answering)

    @property
    def traffic(self) -> Traffic:
        """Where experts were found, since the model was loaded."""
        return self._traffic()

    def submit(self, request: Request) -> Generation:
        """Put a request in the queue; `step` works on it. InputError if it can never be answered."""
        self._own()
        self._check_prompt(request.prompt)
        sampler = Sampler(
            request.sampling,
            request.seed,
            self._num_tokens,
            prompt=request.prompt,
            mask=request.mask,
            logprobs=request.logprobs,
        )
        generation = Generation(request)
        generation.stats.weight_bytes_per_token = self.model.nbytes_per_token
        generation.stats.ceilings = self._ceilings
        self._waiting.append((generation, sampler))
        return generation

    def cancel(self, generation: Generation, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Give up a request; what is known of it already is kept for others. Nothing if it is over."""
        self._drop_unsound()
        self.withdraw(generation)
        for sequence in [*self._reading, *self._answering]:
            if sequence.generation is generation:
                self._end(sequence, reason)
        generation.finish(reason)

    def withdraw(self, generation: Generation) -> None:
        """Take a request out of the queue, if it has not begun. May be called at any time, in the middle of a step."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not generation)

    def run(self, request: Request) -> Iterator[Chosen]:
        """The tokens that follow, as they are chosen; others advance meanwhile. Cancelled when closed early."""
        yield from self.tokens(self.submit(request))

    def tokens(self, generation: Generation) -> Iterator[Chosen]:
        """What `run` gives, of a request that was submitted."""
        try:
            while True:
                over = generation.finish_reason
                yield from generation.take()
                if over:
                    break
                self.step()
            if generation.error:
                raise generation.error
        finally:
            self.cancel(generation)

    def step(self) -> bool:
        """Run one token of each answer and, if it is a prompt's turn, read a piece of it. False if nothing is to do.

        Prompts and answers get half of the time each.
        """
        self._own()
        self._drop_unsound()
        while self._waiting and self.active < self._places:
            state = self.model.new_sequence()
            self._reading.append(Running(*self._waiting.popleft(), state, keeps=state.nbytes <= self.cache.budget))
        if not self.active:
            return False
        before, working = self._counters(), [*self._reading, *self._answering]
        self._sound = False
        try:
            answering = list(self._answering)
            if self._reading and (not answering or self._debt <= 0):
                self._debt += self._read(self._reading[0])
            if answering:
                self._debt -= self._decode(answering)
            self._debt = max(self._debt, 0.0) if self._answering else 0.0
            self._sound = True
        except InputError as error:  # a file that changed, say: states cannot be trusted, but those kept earlier
            self._drop(FinishReason.FAILED, error)
        except (MemoryError, torch.OutOfMemoryError):  # of the host, of a device
            self._drop(FinishReason.FAILED, _no_memory())
        for sequence in working:
            sequence.count(before, self._counters())
        return True

    def _read(self, sequence: Running) -> float:
        """The next piece of a prompt; after the last one, the first token of the answer. Seconds that it took."""
        start = time.perf_counter()
        self._reuse(sequence)
        prompt, first = sequence.request.prompt, len(sequence.tokens)
        limit = IN_COMPANY if self._answering else self.piece
        last = next_cut(first, sequence.marks, len(prompt), limit)
        self.make_room(self._growth(first, last))
        sequence.generation.prompt_done, sequence.generation.piece = first, last - first
        hidden = self.model.hidden(prompt[first:last], sequence.state)
        row = self._candidates(hidden[-1:], [sequence])[0] if last == len(prompt) else None
        self._score(sequence, hidden, first)
        self._check()  # before anyone believes them
        sequence.tokens.extend(prompt[first:last])
        sequence.generation.prompt_done, sequence.generation.piece = last, 0
        if last in sequence.marks:
            self._keep(sequence)
        seconds = time.perf_counter() - start
        sequence.stats.prefill_seconds += seconds
        self._reading.rotate(-1)
        if row is not None:
            self._reading.remove(sequence)
            self._answering.append(sequence)
            self._choose(sequence, row)
        return seconds

    def _reuse(self, sequence: Running) -> None:
        """Go on from the longest beginning of the prompt that is known, if that is longer than what was read."""
        prompt = sequence.request.prompt
        if sequence.request.score_prompt:
            return
        found, read = self.cache.longest(prompt, len(prompt) - SHORTEST), len(sequence.tokens)
        if found and found[1] > read:
            snapshot, length = found
            self.make_room(self.model.pages(1))
            sequence.state = snapshot.resume(length)
            sequence.tokens = list(prompt[:length])
            sequence.stats.reused_tokens += length - read

    def _score(self, sequence: Running, hidden: Tensor, first: int) -> None:
        """Score what follows each token of a piece that began at `first`, as far as it is of the prompt."""
        request, scores = sequence.request, sequence.generation.prompt_scores
        if request.score_prompt:
            following = request.prompt[first + 1 : first + 1 + hidden.shape[0]]
            scores += [] if scores else [None]
            scores += scores_of(self.model, hidden, following, request.logprobs or 0, self._num_tokens)

    def _decode(self, sequences: list[Running]) -> float:
        """Run the token that each of them chose last, and choose the next. Seconds that it took."""
        start = time.perf_counter()
        self.make_room(sum(self._growth(len(each.tokens), len(each.tokens) + 1) for each in sequences))
        hidden = self.model.step([each.last for each in sequences], [each.state for each in sequences])
        rows = self._candidates(hidden, sequences)
        seconds = time.perf_counter() - start
        self._check()
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.tokens.append(sequence.last)
            sequence.stats.decoded_tokens += 1
            sequence.stats.decode_seconds += seconds
            self._choose(sequence, row)
        return seconds

    def _candidates(self, hidden: Tensor, sequences: list[Running]) -> list[Row]:
        """What the sequences choose by, after their last tokens, hidden [B, H]."""
        return self.model.candidates(hidden, [each.sampler.needed for each in sequences], self._num_tokens)

    def _choose(self, sequence: Running, row: Row) -> None:
        """Choose a token by what comes after the last one; ends the answer where that is the end."""
        request, stats = sequence.request, sequence.stats
        if request.max_tokens == 0:
            return self._end(sequence, FinishReason.MAX_TOKENS)
        if len(sequence.tokens) >= self.context:
            return self._end(sequence, FinishReason.CONTEXT_FULL)
        try:
            chosen = sequence.sampler.choose(row)
        except InputError as error:  # a grammar or a bias that leaves nothing: no concern of the others
            return self._end(sequence, FinishReason.REFUSED, error)
        if chosen.token in self.stop or chosen.token in request.stop_tokens:
            sequence.generation.ended_by = chosen
            return self._end(sequence, FinishReason.STOP_TOKEN)
        sequence.add(chosen)
        if stats.generated_tokens == request.max_tokens:
            self._end(sequence, FinishReason.MAX_TOKENS)
        elif len(sequence.tokens) + 1 == self.context:
            self._end(sequence, FinishReason.CONTEXT_FULL)

    def _end(self, sequence: Running, reason: FinishReason, error: InputError | None = None) -> None:
        """Free the place of a sequence; what it knows is kept for others."""
        for places in (self._reading, self._answering):
            if sequence in places:
                places.remove(sequence)
        if reason is not FinishReason.REFUSED:  # that may be for logits that are no numbers
            self._keep(sequence)
        sequence.generation.finish(reason, error)

    def _keep(self, sequence: Running) -> None:
        """Remember a sequence as it is now, for prompts that begin so."""
        worth = sequence.tokens and not sequence.request.score_prompt
        if worth and self.cache.make_room(sequence.state.nbytes):
            self.make_room(self.model.pages(1))
            self.cache.put(sequence.tokens, sequence.state.snapshot())

    def _drop_unsound(self) -> None:
        """After a step that was interrupted, by Ctrl-C for one."""
        if not self._sound:
            self._drop(FinishReason.CANCELLED)

    def _drop(self, reason: FinishReason, error: InputError | None = None) -> None:
        """End everything in work, and keep none of it: states and tokens may disagree."""
        for sequence in [*self._reading, *self._answering]:
            sequence.generation.finish(reason, error)
        self._reading.clear()
        self._answering.clear()
        self._sound = True

    def make_room(self, pages: int) -> None:
        """Forget kept states until there is memory for keys and values in so many more pages."""
        while pages and self.model.pages_in_use + pages > self._most_pages and self.cache.evict():
            pass

    def _growth(self, first: int, last: int) -> int:
        """Pages that a sequence of `first` tokens needs to have `last`."""
        return self.model.pages(last) - self.model.pages(first)

    def _own(self) -> None:
        """RuntimeError in any thread but the first."""
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise RuntimeError("an engine belongs to the thread that used it first; mosaic-serve is for more of them")

    def _counters(self) -> tuple[Traffic, int]:
        return self._traffic(), major_faults()

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InputError("the prompt is empty", found="no tokens", expected="some text", remedy="write a prompt")
        if len(prompt) > self.context:
            raise InputError(
                "the prompt does not fit the context",
                found=f"{len(prompt):,} tokens",
                expected=f"at most {self.context:,}",
                remedy="shorten the prompt, raise --context if the model allows it, or start a new chat",
            )
        if not 0 <= min(prompt) <= max(prompt) < self._num_tokens:
            raise InputError(
                "the prompt has a token that the model does not know",
                found=min(prompt) if min(prompt) < 0 else max(prompt),
                expected=f"token ids from 0 to {self._num_tokens - 1:,}",
                remedy="use the model's own tokenizer",
            )


def _no_memory() -> InputError:
    return InputError(
        "the system gives no more memory",
        found="an allocation that failed",
        expected="what was planned for",
        remedy="give less with --ram or --vram, or end what else takes memory",
    )
