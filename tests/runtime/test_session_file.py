"""Session files: what was saved comes back to the bit, and anything else is refused by name."""

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError
from mosaic.format.layout import Entry, header
from mosaic.format.shard import read_header, read_with_metadata
from mosaic.runtime import session_file, session_stream
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.session_file import load, save
from mosaic.runtime.session_layout import Identity
from mosaic.runtime.weights import Weights
from support.interrupts import InterruptAt
from support.states import ATTENTION, HYBRID, Memory, expected, held, same

TOKENS = np.random.default_rng(3).integers(0, 256, 200).tolist()
DOCUMENT = {"messages": [{"role": "user", "content": "Grüße, 你好 \ud800 \x00"}], "settings": {"seed": None, "t": 0.5}}
SIZE = Memory(HYBRID).new_sequence().nbytes


def identity_of(memory: Memory) -> Identity:
    return Identity("a" * 64, "b" * 64, memory.pool.format)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def chat(memory: Memory):
    """A chat whose last answer was given twice: three states on one way, a fourth that left it in the middle."""
    state, states = memory.new_sequence(), []
    for first, last in ((0, 30), (30, 64), (64, 150)):
        memory.advance(state, TOKENS[first:last])
        states.append((TOKENS[:last], state.snapshot()))
    other = states[1][1].resume()
    memory.advance(other, TOKENS[150:160])
    return [*states, (TOKENS[:64] + TOKENS[150:160], other.snapshot())]


@pytest.fixture
def memory() -> Memory:
    return Memory(HYBRID)


@pytest.fixture
def file(tmp_path, memory) -> Path:
    save(tmp_path / "chat.session", identity_of(memory), chat(memory), DOCUMENT)
    return tmp_path / "chat.session"


@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize("spec", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
def test_what_was_saved_comes_back(tmp_path, spec, kv):
    """To the bit, and what states shared they share again."""
    memory, other = Memory(spec, kv), Memory(spec, kv)
    states, file = chat(memory), tmp_path / "chat.session"
    save(file, identity_of(memory), states, DOCUMENT)
    found, document = load(file, identity_of(memory), other)
    assert document == DOCUMENT
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in states]
    assert other.pool.pages_in_use == sum(1 for _ in session_file._pages(states)) == 2 * (1 + 1 + 2 + 1)
    for tokens, snapshot in found:
        state = snapshot.resume()
        assert same(held(state), expected(spec, kv, tokens))
        other.advance(state, TOKENS[:70])
        assert same(held(state), expected(spec, kv, [*tokens, *TOKENS[:70]]))
    assert snapshot.nbytes == states[0][1].nbytes
    del found, snapshot, state
    assert other.pool.pages_in_use == 0


@pytest.mark.parametrize("ops", [CpuOps, ReferenceOps])
def test_a_model_goes_on_from_a_file_as_from_memory(tiny, tmp_path, ops):
    """Another process, in effect. The reference's recurrent states are float64 in memory and float32 in the file."""
    weights = Weights(tiny)
    model, other = (HybridModel(weights, ops(), KVFormat.BF16) for _ in range(2))
    identity = Identity.of(read_catalog(tiny), KVFormat.BF16)
    state = model.new_sequence()
    model.hidden(TOKENS[:70], state)
    save(tmp_path / "s", identity, [(TOKENS[:70], state.snapshot())], {})
    [(tokens, snapshot)], _ = load(tmp_path / "s", identity, other)
    assert tokens == TOKENS[:70]
    wanted, found = model.hidden(TOKENS[70:75], state), other.hidden(TOKENS[70:75], snapshot.resume())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0 if ops is CpuOps else 1e-4)


@pytest.mark.parametrize("states", [0, 1])
def test_a_session_without_states_or_tokens(memory, tmp_path, states):
    kept = [([], memory.new_sequence().snapshot())] * states
    save(tmp_path / "s", identity_of(memory), kept, DOCUMENT)
    found, document = load(tmp_path / "s", identity_of(memory), memory)
    assert [(tokens, snapshot.length) for tokens, snapshot in found] == [([], 0)] * states
    assert document == DOCUMENT


@pytest.mark.parametrize("kv", list(KVFormat))
def test_the_safetensors_library_reads_it(tmp_path, kv):
    memory, file = Memory(HYBRID, kv), tmp_path / "chat.session"
    states = chat(memory)
    save(file, identity_of(memory), states, DOCUMENT)
    tensors = load_file(file)
    for number, (tokens, snapshot) in enumerate(states):
        assert tensors[f"states.{number}.tokens"].tolist() == tokens
        pages = tensors["pages"][tensors[f"states.{number}.pages"].long()].float()  # [layers, pages, 2, 64, heads, d]
        if kv is KVFormat.E4M3:
            pages *= tensors["page_scales"][tensors[f"states.{number}.pages"].long()][..., None]
        keys = pages[:, :, 0].flatten(1, 2)[:, : len(tokens)]
        assert same(list(keys), [snapshot.layers[layer].read()[0] for layer in (1, 3)])
        assert same(list(tensors[f"states.{number}.conv"]), [snapshot.layers[layer].conv for layer in (0, 2)])
        assert same(list(tensors[f"states.{number}.recurrent"]), [snapshot.layers[layer].recurrent for layer in (0, 2)])
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["document"]) == DOCUMENT
        assert opened.metadata()["version"] == "1"


def test_nothing_that_a_page_held_before_gets_into_a_file(tmp_path, memory):
    pages = [memory.pool.allocate() for _ in range(len(memory.pool._idle) + 1)]
    for page in pages:
        page.values.fill_(7.0)
    del page, pages
    save(tmp_path / "s", identity_of(memory), [(TOKENS[:3], memory.after(TOKENS[:3]).snapshot())], {})
    assert not load_file(tmp_path / "s")["pages"][:, :, 3:].any()


def test_the_states_that_fit_a_budget_are_the_last_ones(file, memory):
    for room, lengths in ((0, []), (1, [74]), (2, [150, 74]), (9, [30, 64, 150, 74])):
        other = Memory(HYBRID)
        found, document = load(file, identity_of(memory), other, room * SIZE + SIZE // 2)
        assert [snapshot.length for _, snapshot in found] == lengths
        assert document == DOCUMENT
        assert sum(snapshot.nbytes for _, snapshot in found) <= room * SIZE
        for tokens, snapshot in found:
            assert same(held(snapshot.resume()), expected(HYBRID, KVFormat.BF16, tokens))
    assert load(file, identity_of(memory), Memory(HYBRID), SIZE)[0][0][1].length == 74


# --- writing ----------------------------------------------------------------------------------------------------------


def test_only_the_owner_may_read_it(file, memory):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    save(file, identity_of(memory), [], {})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert names(file.parent) == [file.name]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(file, memory, monkeypatch, fails):
    before = file.read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os if fails == "fsync" else Path, fails, full)
    with pytest.raises(InputError, match="cannot save the session") as caught:
        save(file, identity_of(memory), chat(memory), {})
    assert "No space" in caught.value.facts["found"]
    assert file.read_bytes() == before
    assert names(file.parent) == [file.name]


def test_places_that_cannot_be_written_are_named(tmp_path, memory):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "no" / "folder", tmp_path / "pipe", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="cannot save the session") as caught:
            save(place, identity_of(memory), [], {})
        assert caught.value.facts["file"] == str(place)
    assert names(tmp_path) == ["pipe"]


def test_messages_that_could_not_be_read_again_are_not_saved(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(session_file, "MAX_HEADER", 8191)
    with pytest.raises(InputError, match="cannot save the session"):
        save(tmp_path / "s", identity_of(memory), [], {"text": "x" * 8000})
    assert not names(tmp_path)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_leaves_the_old_file_or_the_new_one(file, memory):
    before, states, line = file.read_bytes(), chat(memory)[:1], 0
    save(file.with_name("after"), identity_of(memory), states, {})
    after = file.with_name("after").read_bytes()
    modules = {session_file.__file__, session_stream.__file__}
    while True:
        line += 1
        file.write_bytes(before)
        interrupt = InterruptAt(line, modules)
        try:
            with interrupt:
                save(file, identity_of(memory), states, {})
        except KeyboardInterrupt:
            pass
        assert file.read_bytes() in (before, after), interrupt.where
        if not interrupt.where:
            break
    assert file.read_bytes() == after
    assert line > 40
    left = [name for name in names(file.parent) if name.endswith(".tmp")]
    assert len(left) <= 2  # interrupted before anything knew of the file


# --- hostile files ----------------------------------------------------------------------------------------------------


def refused(file: Path, memory: Memory, identity: Identity | None = None) -> SimpleNamespace:
    """Problem and facts of the error; no page is left in use."""
    other = Memory(memory.spec, memory.pool.format)
    try:
        load(file, identity or identity_of(memory), other)
        pytest.fail("not refused")
    except InputError as error:
        found = SimpleNamespace(problem=error.problem, facts=error.facts)
    assert found.facts["file"] == str(file)
    assert other.pool.pages_in_use == 0
    return found


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"source_fingerprint": "c" * 64}, "of another model"),
        ({"plan_digest": "c" * 64}, "of another conversion"),
        ({"kv": KVFormat.F32}, "stored in another way"),
    ],
)
def test_a_session_of_something_else_is_refused(file, memory, other, text):
    memory = Memory(HYBRID, other.get("kv", KVFormat.BF16))
    error = refused(file, memory, replace(identity_of(memory), **other))
    assert text in error.problem
    assert "remedy" in error.facts
    assert "--kv bf16" in error.facts["remedy"] or "kv" not in other


def test_a_changed_byte_is_found_wherever_it_is(file, memory):
    """Some in every tensor, some hundred in the header."""
    data = file.read_bytes()
    starts = [info.offset for info in read_header(file).values() if info.nbytes]
    for position in {*range(0, starts[0], 41), *starts, *(start + 1 for start in starts), len(data) - 1}:
        file.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        refused(file, memory)


def test_a_file_that_ends_early_is_refused(file, memory):
    data = file.read_bytes()
    for length in (0, 7, 8, 100, 5000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        refused(file, memory)
    file.write_bytes(data + b"x")
    refused(file, memory)


def test_a_file_that_is_cut_while_it_is_read_is_refused(file, memory, monkeypatch):
    data = file.read_bytes()
    for length in (0, 5000, len(data) - 1):
        file.write_bytes(data)
        head = session_file.read_head(file, identity_of(memory), memory.new_sequence().layers, 4096)
        monkeypatch.setattr(session_file, "read_head", lambda *_, head=head: head)
        file.write_bytes(data[:length])
        assert "shorter" in refused(file, memory).facts["found"]
        monkeypatch.undo()


def rewrite(file: Path, change) -> None:
    """The file with other metadata or tensors and sound checksums: `change(metadata, tensors)` in place."""
    (infos, texts), data = read_with_metadata(file), file.read_bytes()
    metadata = {key: json.loads(text) for key, text in texts.items()}
    del infos["checksums"]
    tensors = {n: [i.dtype, i.shape, data[i.offset : i.offset + i.nbytes]] for n, i in infos.items()}
    change(metadata, tensors)
    entries = [Entry(name, dtype, tuple(shape)) for name, (dtype, shape, _) in tensors.items()]
    head = header([*entries, Entry("checksums", "U32", (1 + len(entries),))],
                  {key: json.dumps(value) for key, value in metadata.items()})  # fmt: skip
    session_stream.write(file, head, [[np.frombuffer(part, np.uint8)] for _, _, part in tensors.values()])


def test_a_rewritten_file_is_read(file, memory):
    """So that the refusals below are for what was changed."""
    before = file.read_bytes()
    rewrite(file, lambda metadata, tensors: None)
    assert file.read_bytes() == before
    assert len(load(file, identity_of(memory), memory)[0]) == 4


def set_contents(**values):
    return lambda metadata, tensors: metadata["contents"].update(values)


def set_page(number: int):
    def change(metadata, tensors):
        tensors["states.2.pages"][2] = np.array([0, 1, number, 3, 4, 5], "<i4").tobytes()

    return change


def reshape(name: str, *shape: int):
    return lambda metadata, tensors: tensors[name].__setitem__(1, shape)


def swap(metadata, tensors):
    tensors["states.0.conv"], tensors["states.0.tokens"] = tensors["states.0.tokens"], tensors["states.0.conv"]


LIES = {
    "no version": lambda metadata, tensors: metadata.pop("version"),
    "a later version": lambda metadata, tensors: metadata.update(version=2),
    "no contents": lambda metadata, tensors: metadata.pop("contents"),
    "contents that are a list": lambda metadata, tensors: metadata.update(contents=[]),
    "no document": lambda metadata, tensors: metadata.pop("document"),
    "a document that is a list": lambda metadata, tensors: metadata.update(document=[]),
    "an unknown KV format": lambda metadata, tensors: metadata["contents"]["identity"].update(kv="f16"),
    "a length below 0": set_contents(lengths=[30, 64, 150, -1]),
    "another length": set_contents(lengths=[30, 64, 150, 75]),
    "a length beyond the context": set_contents(lengths=[30, 64, 150, 5000]),
    "a huge length": set_contents(lengths=[30, 64, 150, 2**62]),
    "a length that is a truth": set_contents(lengths=[30, 64, 150, True]),
    "a state too few": set_contents(lengths=[30, 64, 150]),
    "many states too many": set_contents(lengths=[30, 64, 150, 74, *[5] * 100_000]),
    "a page too few": set_contents(pages=9),
    "huge pages": set_contents(pages=2**62),
    "a page that is not there": set_page(10),
    "a page below 0": set_page(-1),
    "another shape": reshape("states.1.pages", 1, 2),
    "another shape of a state": reshape("states.1.recurrent", 2, 4, 3, 5),
    "an unknown tensor": lambda metadata, tensors: tensors.update(more=["F32", (1,), b"1234"]),
    "a tensor too few": lambda metadata, tensors: tensors.pop("states.0.conv"),
    "tensors swapped": swap,
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_under_sound_checksums_are_refused(file, memory, lie):
    rewrite(file, LIES[lie])
    assert "session" in refused(file, memory).problem


def test_metadata_that_are_not_json_are_refused(file, memory):
    data = file.read_bytes()
    for text in (b'"document":"[', b'"document":"{\\"a\\":1,\\"a\\":2'):
        broken = data.replace(b'"document":"{', text, 1)
        extra = len(broken) - len(data)  # taken from the padding, which ends where the data begins
        start = min(info.offset for info in read_header(file).values())
        file.write_bytes(broken[: start + extra].rstrip(b" ").ljust(start) + broken[start + extra :])
        assert "JSON" in refused(file, memory).facts["found"]
        file.write_bytes(data)


def test_other_files_are_refused(tiny, tmp_path, memory):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("Grüße")
    for file in (tmp_path / "missing", tmp_path, tmp_path / "pipe", tmp_path / "text", tiny / "outside.safetensors"):
        refused(file, memory)
