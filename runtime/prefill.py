"""How prompts are cut into pieces that are computed together.

A token's bits do not depend on the cuts, as long as no piece is a single token: that would take the kernels of
decoding.
"""

from collections.abc import Sequence

PREFILL_CHUNK = 1024  # tokens computed together, at most
IN_COMPANY = 96  # the same while other sequences wait for their next token
SPACING = 2048  # tokens between states that are kept within a long prompt; each costs one more pass over the weights
SHORTEST = 2  # tokens of a piece


def marks(boundaries: Sequence[int], total: int) -> list[int]:
    """Where states are kept while `total` tokens are read: at the last boundary, and before it at some.

    Without boundaries as near the end as can be: the same prompt may come again, or a longer one.
    """
    boundaries = boundaries or [total - SHORTEST]
    usable = [place for place in boundaries if SHORTEST <= place <= total - SHORTEST]
    chosen: list[int] = []
    for place in usable[:-1]:
        if place - (chosen[-1] if chosen else 0) >= SPACING:
            chosen.append(place)
    if usable and usable[-1] - (chosen[-1] if chosen else 0) < SHORTEST:
        chosen.pop()
    return [*chosen, *usable[-1:]]


def next_cut(done: int, places: Sequence[int], total: int, limit: int) -> int:
    """Where the piece ends that begins at `done`: at the next of `places` or the end, or at most `limit` tokens on."""
    end = min((place for place in places if place >= done + SHORTEST), default=total)
    if end - done <= limit:
        return end
    return done + limit - (end - done - limit < SHORTEST)
