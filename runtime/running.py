"""A request in work: its sequence's state and tokens, its sampler, and where its figures begin."""

from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.prefill import marks
from mosaic.runtime.request import Generation, Request, Stats
from mosaic.runtime.sampler import Chosen, Sampler
from mosaic.runtime.state import SequenceState


class Running:
    """`state` and `tokens` agree between two steps: `tokens` are those that `state` remembers.

    `keeps`: whether states within the prompt are worth a cut there.
    """

    def __init__(self, generation: Generation, sampler: Sampler, state: SequenceState, *, keeps: bool) -> None:
        request = generation.request
        self.generation = generation
        self.sampler = sampler
        self.state = state
        self.tokens: list[int] = []
        self.marks = marks(request.boundaries, len(request.prompt)) if keeps and not request.score_prompt else []
        self.last = -1  # the token chosen last, which the model has not seen yet
        self._since: tuple[Traffic, int] | None = None

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.generation.request

    @property
    def stats(self) -> Stats:
        """Its figures."""
        return self.generation.stats

    def add(self, chosen: Chosen) -> None:
        """The next token of the answer, to be run in the next step."""
        self.last = chosen.token
        self.generation.add(chosen)

    def count(self, before: tuple[Traffic, int], now: tuple[Traffic, int]) -> None:
        """Note what happened from the first step that worked on it up to now: expert traffic and major faults."""
        traffic, faults = self._since = self._since or before
        self.stats.traffic, self.stats.major_faults = now[0].since(traffic), now[1] - faults
