"""What a layer asks for its routed experts, whichever store has them: mapped.py, cached.py, source_weights.py."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.weights import Expert


@dataclass(eq=False)
class Loan:
    """The bytes of an expert in memory, as they lie in its shard. Any thread may read them until it is given back.

    So it is when nobody holds it any more: an interruption may come before whoever asked could note it.
    """

    span: NDArray[np.uint8]  # gate | up | down
    scales: NDArray[np.uint8]  # the same; none if it has none
    sound: bool = True  # False: the store began anew, and what was read meanwhile may be another expert's
    given_back: bool = False

    def give_back(self) -> None:
        """Nobody reads the bytes any more. The store looks when it is asked for something else."""
        self.given_back = True


class ExpertStore(Protocol):
    """Where routed experts come from. Sees every routing decision, and brings the experts of one layer at a time."""

    def observe(self, layer: int, chosen: NDArray[np.int64], elsewhere: Container[int] = ()) -> None:
        """The router of a layer chose these experts; `arriving` of the same layer follows.

        It will not ask for those that a faster tier has, `elsewhere`: their uses say nothing of who is needed here. A
        store may look again later, at what is there by then.

        [T, K] for T tokens of one sequence, or [B, T, K] for those of B.
        """

    def arriving(self, layer: int, experts: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """Each of the experts once, in groups; the first group is of those that are there, perhaps none.

        A group is valid until the next is asked for. `tokens` of each sequence: of one this is decoding, of more a
        prompt is read.
        """

    def nbytes(self, layer: int, expert: int) -> int:
        """Bytes that using an expert once reads."""

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """These experts of a layer may be asked for soon."""

    def lend(self, layer: int, expert: int) -> Loan | None:
        """An expert that is in memory and stays there until it is given back. No traffic, and no use.

        None if it is not there, while `arriving` has groups to come, or with top_k on loan.
        """

    @property
    def traffic(self) -> Traffic:
        """What happened so far; a copy."""


class PresentExperts:
    """Base of the stores that have every expert at hand: all of them in one group."""

    def __init__(self) -> None:
        self._hits = 0

    def expert(self, layer: int, expert: int) -> Expert:
        """The matrices of one expert."""
        raise NotImplementedError

    def observe(self, layer: int, chosen: NDArray[np.int64], elsewhere: Container[int] = ()) -> None:
        """See ExpertStore. Nothing to decide."""

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """See ExpertStore. Nothing to read."""

    def lend(self, layer: int, expert: int) -> Loan | None:
        """See ExpertStore. None: an expert need not lie in one piece."""
        return None

    def arriving(self, layer: int, experts: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """See ExpertStore."""
        self._hits += len(experts)
        yield {expert: self.expert(layer, expert) for expert in experts}

    def nbytes(self, layer: int, expert: int) -> int:
        """See ExpertStore."""
        return self.expert(layer, expert).nbytes

    @property
    def traffic(self) -> Traffic:
        """See ExpertStore. What the system reads from the disk on its own account is not known here."""
        return Traffic(hits=self._hits)


class LayerExperts:
    """The experts of one layer, with the shared one among them: number E. An `ExpertSource` of mosaic.runtime.ops."""

    def __init__(self, store: ExpertStore, layer: int, num_experts: int, shared: Expert | None) -> None:
        self.store = store
        self.layer = layer
        self._shared = {} if shared is None else {num_experts: shared}

    def observe(self, chosen: NDArray[np.int64], elsewhere: Container[int] = ()) -> None:
        """See ExpertSource."""
        self.store.observe(self.layer, chosen[..., :-1] if self._shared else chosen, elsewhere)

    def arriving(self, numbers: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """See ExpertSource. The shared expert is always there."""
        routed = [number for number in dict.fromkeys(numbers) if number not in self._shared]
        groups = self.store.arriving(self.layer, routed, tokens) if routed else iter(())
        yield {**next(groups, {}), **{number: self._shared[number] for number in numbers if number in self._shared}}
        yield from groups

    def nbytes(self, numbers: Collection[int]) -> int:
        """See ExpertSource."""
        return sum(
            self._shared[number].nbytes if number in self._shared else self.store.nbytes(self.layer, number)
            for number in numbers
        )
