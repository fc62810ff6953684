"""A session in a file: states that prompts can begin from, and what was said.

A legal safetensors file, since others can look into those. It is as hostile as any other file until its checksums are
read, and as private as what was said. Its tensors are `session_layout`'s, its bytes `session_stream`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mosaic.format.direct import Bytes
from mosaic.format.errors import InputError
from mosaic.format.shard import MAX_HEADER
from mosaic.runtime.kv import PAGE_TOKENS, KVCache, KVFormat, KVPool, Page, pages_of
from mosaic.runtime.model import HybridModel
from mosaic.runtime.session_layout import Contents, Identity, damaged, read_head, split
from mosaic.runtime.session_stream import Reader, write
from mosaic.runtime.state import LayerState, Snapshot

State = tuple[list[int], Snapshot]  # the tokens it has seen, and what it remembers of them


def save(file: Path, identity: Identity, states: Sequence[State], document: dict[str, Any]) -> None:
    """Write states of one model and a JSON object.

    InputError if that cannot be done; the file is as it was then.
    """
    pages = _pages(states)
    contents = Contents(identity, tuple(snapshot.length for _, snapshot in states), len(pages))
    header = contents.header(states[0][1].layers if states else (), document)
    if len(header) > MAX_HEADER:
        raise _unwritable(file, f"{len(header):,} bytes of messages, of which {MAX_HEADER:,} can be read again")
    try:
        if file.exists() and not file.is_file():
            raise _unwritable(file, "a folder or a device")
        write(file, header, _data(states, pages, identity.kv))
    except OSError as error:
        raise _unwritable(file, error.strerror) from error


def _pages(states: Sequence[State]) -> dict[Page, int]:
    """Every page of them once, and how many of its tokens are in use."""
    used: dict[Page, int] = {}
    for _, snapshot in states:
        for cache in split(snapshot.layers)[0]:
            for number, page in enumerate(cache.pages):
                used[page] = max(used.get(page, 0), min(cache.length - number * PAGE_TOKENS, PAGE_TOKENS))
    return used


def _data(states: Sequence[State], pages: dict[Page, int], kv: KVFormat) -> Iterator[Iterable[Bytes]]:
    """Every tensor of `Contents.entries`, in pieces."""
    numbers = {page: number for number, page in enumerate(pages)}
    for tokens, snapshot in states:
        assert len(tokens) == snapshot.length
        caches, deltas = split(snapshot.layers)
        yield [np.array(tokens, "<i4").view(np.uint8)]
        yield [np.array([numbers[page] for page in cache.pages], "<i4").view(np.uint8) for cache in caches]
        if deltas:
            yield (_bytes(delta.conv.float().contiguous()) for delta in deltas)
            yield (_bytes(delta.recurrent.float().contiguous()) for delta in deltas)
    if states and split(states[0][1].layers)[0]:
        yield (_used(page.values, count) for page, count in pages.items())
        if kv is KVFormat.E4M3:
            yield (_used(page.scales, count) for page, count in pages.items())


def _used(stored: Tensor, count: int) -> Bytes:
    """The bytes of a page with zeros where no token is: what was there before is nobody's business."""
    if count == PAGE_TOKENS:
        return _bytes(stored.cpu())
    clean = stored.view(torch.uint8).to("cpu", copy=True)
    clean[:, count:] = 0
    return _bytes(clean)


def load(
    file: Path,
    identity: Identity,
    model: HybridModel,
    budget: int | None = None,
    longest: int | None = None,
    make_room: Callable[[int], None] = lambda pages: None,
) -> tuple[list[State], dict[str, Any]]:
    """The states and the JSON object of a file, in the order in which `save` was given them.

    `budget`: most bytes of recurrent states; if there are more, the first states are left out. `longest`: states of
    more tokens are left out, too. `make_room` is told how many pages will be taken. InputError if the file is damaged,
    of another model, or has keys and values in another format.
    """
    empty = model.new_sequence()
    header = read_head(file, identity, empty.layers, model.spec.max_position_embeddings)
    contents = header.contents
    fitting = budget // empty.nbytes if budget is not None and empty.nbytes else len(contents.lengths)
    short = [number for number, length in enumerate(contents.lengths) if longest is None or length <= longest]
    wanted = set(short[max(len(short) - fitting, 0) :])
    try:
        with file.open("rb") as stream:
            reader = Reader(stream, header.nbytes)
            drafts = []
            for number, length in enumerate(contents.lengths):
                if number in wanted:
                    drafts.append(_Draft(reader, model.new_sequence().layers, length))
                else:
                    for entry in contents.state_entries(number, empty.layers):
                        reader.skip(entry.nbytes)
            numbers = {number for draft in drafts for row in draft.table for number in row}
            if numbers and not 0 <= min(numbers) <= max(numbers) < contents.pages:
                raise damaged(file, f"a state of pages {min(numbers)} to {max(numbers)}", f"0 to {contents.pages - 1}")
            pools: dict[int, KVPool] = {}
            for number, pool in (user for draft in drafts for user in draft.users()):
                if pools.setdefault(number, pool) is not pool:
                    raise damaged(file, f"layers that share page {number}", "pages of one layer each")
            make_room(len(pools) + 1)
            pages = {number: pools[number].allocate() for number in sorted(pools)}
            caches = split(empty.layers)[0]
            if contents.lengths and caches:
                _read_pages(reader, contents.pages, pages, caches[0].pool)
            wrong = reader.damaged()
    except EOFError as error:
        raise damaged(file, "a file that has become shorter") from error
    except (OSError, MemoryError) as error:  # memory for pages that the system or a device does not give
        remedy = "check the path and its rights, or free some memory"
        found = error.strerror if isinstance(error, OSError) else error
        raise InputError("cannot read a session", file=file, found=found, remedy=remedy) from error
    if wrong is not None:
        raise damaged(file, f"{('header', *header.tensors)[wrong]} with other bytes than its checksum is of")
    return [draft.state(pages) for draft in drafts], header.document


class _Draft:
    """A state that is read: its recurrent states, and which pages it has."""

    def __init__(self, reader: Reader, layers: Sequence[LayerState], length: int) -> None:
        caches, deltas = split(layers)
        tokens, table = np.empty(length, "<i4"), np.empty((len(caches), pages_of(length)), "<i4")
        reader.read([tokens.view(np.uint8)])
        reader.read(row.view(np.uint8) for row in table)
        if deltas:
            reader.read(_bytes(delta.conv) for delta in deltas)
            reader.read(_bytes(delta.recurrent) for delta in deltas)
        self.tokens: list[int] = tokens.tolist()
        self.table: list[list[int]] = table.tolist()
        self._layers = layers

    def users(self) -> Iterator[tuple[int, KVPool]]:
        """Every page, by its number, and the pool of a cache that has it."""
        for cache, row in zip(split(self._layers)[0], self.table, strict=True):
            yield from ((number, cache.pool) for number in row)

    def state(self, pages: dict[int, Page]) -> State:
        """The state, of the pages by their numbers."""
        length, rows = len(self.tokens), iter(self.table)
        layers: list[LayerState] = []
        for layer in self._layers:
            if isinstance(layer, KVCache):
                layers.append(layer.pool.cache([pages[number] for number in next(rows)], length))
            else:
                layer.position = length
                layers.append(layer)
        return self.tokens, Snapshot(tuple(layers), length)


def _read_pages(reader: Reader, count: int, pages: dict[int, Page], pool: KVPool) -> None:
    """Fill the pages that are wanted, by their numbers, of as many as the file has."""
    unwanted = pool.allocate()
    memory = [pages.get(number, unwanted) for number in range(count)]
    reader.read(_filling(page.values for page in memory))
    if pool.format is KVFormat.E4M3:
        reader.read(_filling(page.scales for page in memory))


def _filling(tensors: Iterable[Tensor]) -> Iterator[Bytes]:
    """Where the bytes of contiguous tensors are to be written; a device has them when the next are asked for."""
    for tensor in tensors:
        here = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
        yield _bytes(here)
        if here is not tensor:
            tensor.copy_(here)


def _bytes(tensor: Tensor) -> Bytes:
    """The bytes of a contiguous tensor, where they lie."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _unwritable(file: Path, found: object) -> InputError:
    remedy = "make room on the disk, or save to another file"
    return InputError("cannot save the session", file=file, found=found, remedy=remedy)
