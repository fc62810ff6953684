"""mosaic-bench --replay: its table and its figures are the replay's, and bad traces and budgets are refused."""

import json
import re
import sys

import numpy as np
import pytest

from mosaic.runtime.bench_cli import main
from mosaic.runtime.experts.replay import replay
from mosaic.runtime.experts.trace import Trace, TraceHeader, TraceWriter

HEADER = TraceHeader("a model", (0, 1, 2), 8, 2, 1 << 20)


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs mosaic-bench in this process: (exit code, standard output, error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mosaic-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def trace(tmp_path):
    """(file, what is in it)"""
    file = tmp_path / "a.trace"
    experts = np.argsort(np.random.default_rng(0).random((60, 3, 8)))[..., :2].astype(np.uint16)
    with TraceWriter(file, HEADER) as writer:
        for layer in HEADER.layers:
            writer.record(layer, experts[:, layer])
    return file, Trace(HEADER, experts)


def test_budgets_double_from_the_floor_to_all(bench, trace):
    file, recorded = trace
    code, out, _ = bench("--replay", file, "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    budgets = found.pop("budgets")
    assert found == {"trace": str(file), "model": "a model", "tokens": 60, "layers": 3, "num_experts": 8, "top_k": 2,
                     "expert_nbytes": 1 << 20}  # fmt: skip
    assert [budget["slots"] for budget in budgets] == [6, 12, 24]
    for budget in budgets:
        assert budget["bytes"] == budget["slots"] << 20
        for name, outcome in replay(recorded, budget["slots"]).items():
            assert budget[name] == {"hit_rate": outcome.hit_rate, "bytes_per_token": outcome.bytes_per_token}


def test_a_person_sees_the_same(bench, trace):
    file, recorded = trace
    code, out, err = bench("--replay", file, "--slots", 9, "--slots", 5)
    assert code == 0
    assert "a model: 60 tokens; 3 layers of 8 experts, top 2" in out
    assert "{" not in out
    assert "9 slots" in err
    rows = re.findall(r"^ +(\d+) +0\.0\d (.*)$", out, re.MULTILINE)
    assert [int(slots) for slots, _ in rows] == [9, 5]
    for slots, columns in rows:
        outcomes = replay(recorded, int(slots)).values()
        expected = [f"{each.hit_rate:.2%} {each.bytes_per_token / (1 << 20):.2f}" for each in outcomes]
        assert columns.split() == " ".join(expected).split()


def test_a_cut_trace_is_used_with_a_note(bench, trace):
    file, _ = trace
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = bench("--replay", file, "--slots", 6)
    assert code == 0
    assert "59 tokens" in out
    assert "the last 11 bytes" in err


@pytest.mark.parametrize("slots", [3, 25])
def test_unusable_budgets_are_refused(bench, trace, slots):
    code, out, err = bench("--replay", trace[0], "--slots", slots)
    assert (code, out) == (2, "")
    assert "4, twice the top 2, to 24" in err


def test_unusable_traces_are_refused(bench, tmp_path):
    file = tmp_path / "a.trace"
    assert "cannot read a trace" in bench("--replay", file)[2]
    TraceWriter(file, HEADER).close()
    code, _, err = bench("--replay", file)
    assert code == 2
    assert "a trace without tokens" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("somewhere", "--replay", "a.trace"), "OUT and --replay"),
        (("--demo", "--replay", "a.trace"), "--demo and --replay"),
        (("--demo", "--slots", 9), "--slots needs --replay"),
        (("--replay", "a.trace", "--slots", 0), "--slots"),
        (("--replay", "a.trace", "--kv", "f32"), "--kv means nothing with --replay"),
        (("--replay", "a.trace", "--repetitions", 3), "--repetitions means nothing with --replay"),
    ],
)
def test_unclear_commands_are_refused(bench, arguments, words):
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert words in err
