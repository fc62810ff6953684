"""Trace files: what was recorded is read, what was cut off is left out, lies are refused."""

import json

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.experts.trace import TraceHeader, TraceWriter, read_trace

HEADER = TraceHeader("a model", (0, 2, 3), 6, 2, 1000)
VALUES = {"mosaic_trace": 1, "model": "m", "layers": [0, 2, 3], "num_experts": 6, "top_k": 2, "expert_nbytes": 9}


def choices(tokens: int, seed: int = 0) -> np.ndarray:
    """[T, layers, top_k]"""
    return np.argsort(np.random.default_rng(seed).random((tokens, 3, 6)))[..., :2]


def record(writer: TraceWriter, experts: np.ndarray) -> None:
    for row, layer in enumerate(HEADER.layers):
        writer.record(layer, experts[:, row])


def test_round_trip(tmp_path):
    file = tmp_path / "a.trace"
    prompt, token = choices(50), choices(1, seed=1)
    with TraceWriter(file, HEADER) as writer:
        record(writer, prompt)
        record(writer, token)
        trace = read_trace(file)  # while it is being written
    assert trace.header == HEADER
    assert trace.experts.tolist() == np.concatenate([prompt, token]).tolist()
    assert trace.dropped == 0


def test_the_file_is_as_documented(tmp_path):
    file = tmp_path / "a.trace"
    with TraceWriter(file, HEADER) as writer:
        record(writer, choices(7))
    line, data = file.read_bytes().split(b"\n", 1)
    assert json.loads(line) == {"mosaic_trace": 1, "model": "a model", "layers": [0, 2, 3], "num_experts": 6,
                                "top_k": 2, "expert_nbytes": 1000}  # fmt: skip
    assert data == choices(7).astype("<u2").tobytes()


def test_a_trace_is_continued_where_its_last_whole_token_ends(tmp_path):
    file = tmp_path / "a.trace"
    with TraceWriter(file, HEADER) as writer:
        record(writer, choices(4))
    file.write_bytes(file.read_bytes()[:-5])
    trace = read_trace(file)
    assert trace.experts.tolist() == choices(4)[:3].tolist()
    assert trace.dropped == 7
    with TraceWriter(file, HEADER) as writer:
        record(writer, choices(2, seed=1))
    trace = read_trace(file)
    assert trace.experts.tolist() == [*choices(4)[:3].tolist(), *choices(2, seed=1).tolist()]
    assert trace.dropped == 0


def test_an_interrupted_pass_is_dropped(tmp_path):
    file = tmp_path / "a.trace"
    with TraceWriter(file, HEADER) as writer:
        writer.record(0, choices(9)[:, 0])
        writer.record(2, choices(9)[:, 1])
        assert not len(read_trace(file).experts)
        record(writer, choices(1))
    assert read_trace(file).experts.tolist() == choices(1).tolist()


def test_what_is_not_due_is_refused(tmp_path):
    with TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        with pytest.raises(ValueError, match=r"layer 2, .* where layer 0"):
            writer.record(2, choices(1)[:, 1])
        with pytest.raises(ValueError, match="is due"):
            writer.record(0, np.zeros((1, 3), int))
        writer.record(0, choices(2)[:, 0])
        with pytest.raises(ValueError, match="is due"):
            writer.record(2, choices(1)[:, 1])


def test_a_trace_of_another_model_is_not_continued(tmp_path):
    file = tmp_path / "a.trace"
    TraceWriter(file, HEADER).close()
    before = file.read_bytes()
    with pytest.raises(InputError, match="another model"):
        TraceWriter(file, TraceHeader("another", (0, 2, 3), 6, 2, 1000))
    assert file.read_bytes() == before


def test_another_file_is_not_continued(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("dear diary\n")
    with pytest.raises(InputError, match="not a routing trace"):
        TraceWriter(file, HEADER)
    assert file.read_text() == "dear diary\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mosaic_trace": 2}, "version 2"),
        ({"mosaic_trace": True}, "version True"),
        ({"model": 3}, "wrong type"),
        ({"model": "\x1b[2J"}, "not printable"),
        ({"layers": 3}, "not a list"),
        ({"layers": []}, "ascend"),
        ({"layers": [0, 3, 2]}, "ascend"),
        ({"layers": [0, 2, 2]}, "ascend"),
        ({"layers": [0, 2, True]}, "wrong type"),
        ({"layers": [-1, 2, 3]}, "out of range"),
        ({"layers": [0, 2, 1 << 40]}, "out of range"),
        ({"layers": [0, [], 3]}, "wrong type"),
        ({"num_experts": 1 << 16}, "out of range"),
        ({"num_experts": 6.0}, "wrong type"),
        ({"top_k": 0}, "out of range"),
        ({"top_k": 7}, "out of range"),
        ({"expert_nbytes": 0}, "out of range"),
        ({"expert_nbytes": 1 << 60}, "out of range"),
        ({"extra": 1}, "with the keys"),
    ],
    ids=str,
)
def test_hostile_headers(tmp_path, change, words):
    file = tmp_path / "a.trace"
    file.write_bytes(json.dumps(VALUES | change).encode() + b"\n")
    with pytest.raises(InputError, match=words) as caught:
        read_trace(file)
    assert caught.value.facts["file"] == str(file)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        json.dumps(VALUES).encode(),
        b"\n",
        b"[1]\n",
        b"{\n",
        b"[" * 100_000 + b"\n",
        b'{"model": "a", "model": "b"}\n',
        b"\xff\xfe\n",
        b" " * (1 << 21),
    ],
    ids=["empty", "no end of line", "no header", "a list", "cut", "deep", "twice", "not utf-8", "long"],
)
def test_hostile_files(tmp_path, data):
    file = tmp_path / "a.trace"
    file.write_bytes(data)
    with pytest.raises(InputError, match="not a routing trace"):
        read_trace(file)


@pytest.mark.parametrize("wrong", [(6, 0), (3, 3)], ids=["no such expert", "one twice"])
def test_choices_that_no_router_makes(tmp_path, wrong):
    file = tmp_path / "a.trace"
    experts = choices(9).astype("<u2")
    experts[7, 1] = wrong
    file.write_bytes(json.dumps(VALUES).encode() + b"\n" + experts.tobytes())
    with pytest.raises(InputError, match="token 7, layer 2"):
        read_trace(file)


def test_a_file_that_cannot_be_read(tmp_path):
    for file in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="cannot read a trace"):
            read_trace(file)
