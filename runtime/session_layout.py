"""What a session file says it holds, and in which order: docs/FORMAT.md section 8. The rest is `session_file`'s."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mosaic.format.catalog import Catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import unique_keys
from mosaic.format.layout import Entry, header
from mosaic.format.shard import read_with_metadata
from mosaic.format.typed import typed
from mosaic.runtime.kv import KVCache, KVFormat, pages_of
from mosaic.runtime.state import DeltaState, LayerState

VERSION = 1
CHECKSUMS = "checksums"
_DTYPES = {KVFormat.F32: "F32", KVFormat.BF16: "BF16", KVFormat.E4M3: "F8_E4M3"}


@dataclass(frozen=True)
class Identity:
    """What a state can be used with: the same weights, keys and values stored in the same way."""

    source_fingerprint: str
    plan_digest: str
    kv: KVFormat

    @classmethod
    def of(cls, catalog: Catalog, kv: KVFormat) -> "Identity":
        """Of a model directory."""
        return cls(catalog.source_fingerprint, catalog.plan_digest, kv)


@dataclass(frozen=True)
class Contents:
    """`lengths`: tokens of each state. `pages`: how many there are, shared ones once."""

    identity: Identity
    lengths: tuple[int, ...]
    pages: int

    def entries(self, layers: Sequence[LayerState]) -> Iterator[Entry]:
        """Every tensor, in order; `layers` as any state of the model has them."""
        count = 0
        for entry in self._entries(layers):
            count += 1
            yield entry
        yield Entry(CHECKSUMS, "U32", (1 + count,))

    def _entries(self, layers: Sequence[LayerState]) -> Iterator[Entry]:
        for number in range(len(self.lengths)):
            yield from self.state_entries(number, layers)
        caches, _ = split(layers)
        if self.lengths and caches:
            assert caches[0].format is self.identity.kv
            shape = self.pages, *caches[0].pool.page_shape
            yield Entry("pages", _DTYPES[self.identity.kv], shape)
            if self.identity.kv is KVFormat.E4M3:
                yield Entry("page_scales", "F32", shape[:-1])

    def state_entries(self, number: int, layers: Sequence[LayerState]) -> Iterator[Entry]:
        """The tensors of one state."""
        (caches, deltas), length = split(layers), self.lengths[number]
        yield Entry(f"states.{number}.tokens", "I32", (length,))
        yield Entry(f"states.{number}.pages", "I32", (len(caches), pages_of(length)))
        if deltas:
            yield Entry(f"states.{number}.conv", "F32", (len(deltas), *deltas[0].conv.shape))
            yield Entry(f"states.{number}.recurrent", "F32", (len(deltas), *deltas[0].recurrent.shape))

    def header(self, layers: Sequence[LayerState], document: dict[str, Any]) -> bytes:
        """The head of the file."""
        texts = {"contents": json.dumps(asdict(self)), "document": json.dumps(document)}
        return header(list(self.entries(layers)), {"version": str(VERSION), **texts})


@dataclass(frozen=True)
class Header:
    """The head of a file that was read: its JSON object, its tensors by name, and where their data begins."""

    contents: Contents
    document: dict[str, Any]
    tensors: tuple[str, ...]
    nbytes: int


def read_head(file: Path, identity: Identity, layers: Sequence[LayerState], longest: int) -> Header:
    """The head of a session file; InputError if it is none, of another model, or not what its contents call for.

    `layers` as any state of the model has them; `longest`: most tokens that a state of it can have.
    """
    try:
        tensors, metadata = read_with_metadata(file)
    except InputError as error:
        raise _refused("not a session, or one that is damaged", file, error.facts.get("found")) from error
    if metadata.get("version") != str(VERSION):
        raise InputError(
            "not a session of this format version",
            file=file,
            found=metadata.get("version", "no session"),
            expected=VERSION,
            remedy="use the Mosaic that wrote it, or start a new session",
        )
    try:
        contents = typed(Contents, _json(metadata.get("contents", "")), "contents")
        document = _json(metadata.get("document", ""))
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"metadata that are not JSON as it is written: {error}") from error
    if not isinstance(document, dict):
        raise damaged(file, f"a document that is a {type(document).__name__}")
    _check_identity(file, contents.identity, identity)
    if any(not 0 <= length <= longest for length in contents.lengths):
        raise damaged(file, f"states of {min(contents.lengths):,} to {max(contents.lengths):,} tokens")
    start = position = min((info.offset for info in tensors.values()), default=0)
    found = iter(tensors.items())
    for entry in contents.entries(layers):
        name, info = next(found, (None, None))
        if info is None or name != entry.name:
            raise damaged(file, f"{name or 'nothing'} where {entry.name} belongs")
        if (info.dtype, info.shape, info.offset) != (entry.dtype, entry.shape, position):
            raise damaged(file, f"{entry.name} {info.dtype} {list(info.shape)}", f"{entry.dtype} {list(entry.shape)}")
        position += entry.nbytes
    if extra := next(found, None):
        raise damaged(file, f"{extra[0]} behind the last tensor")
    return Header(contents, document, tuple(tensors), start)


def _check_identity(file: Path, found: Identity, expected: Identity) -> None:
    def different(problem: str, name: str, remedy: str) -> InputError:
        facts = {"found": getattr(found, name), "expected": getattr(expected, name)}
        return InputError(problem, file=file, **facts, remedy=remedy)

    if found.source_fingerprint != expected.source_fingerprint:
        remedy = "use the model it was saved with, or start a new session"
        raise different("a session of another model", "source_fingerprint", remedy)
    if found.plan_digest != expected.plan_digest:
        remedy = "use the directory it was saved with, or start a new session"
        raise different("a session of another conversion of this model", "plan_digest", remedy)
    if found.kv is not expected.kv:
        remedy = f"run with --kv {found.kv}, or start a new session"
        raise different("a session whose keys and values are stored in another way", "kv", remedy)


def _json(text: str) -> object:
    return json.loads(text, object_pairs_hook=unique_keys)


def damaged(file: Path, found: object, expected: object = None) -> InputError:
    """The error for a file that is not as `save` writes them."""
    return _refused("not a sound session file", file, found, expected)


def _refused(problem: str, file: Path, found: object, expected: object = None) -> InputError:
    remedy = "check the path, or start a new session"
    return InputError(problem, file=file, found=found, expected=expected, remedy=remedy)


def split(layers: Sequence[LayerState]) -> tuple[list[KVCache], list[DeltaState]]:
    """The states of attention layers, and those of linear-attention layers."""
    caches = [layer for layer in layers if isinstance(layer, KVCache)]
    return caches, [layer for layer in layers if isinstance(layer, DeltaState)]
