"""The synthetic traces have the statistics they are named for (FIELD-NOTES D2, D3), and the program writes them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.routing import EXPERT_NBYTES, Kind, routing
from mosaic.runtime.bench_simulate import BUNDLED
from mosaic.runtime.experts.trace import TraceHeader, read_trace

PROGRAM = Path(__file__).with_name("routing.py")
LAYERS, EXPERTS, TOP_K, TOKENS = 40, 256, 8, 2000


def chosen(kind: Kind, seed: int, tokens: int = TOKENS) -> np.ndarray:
    """[tokens, layers, top_k]"""
    choices = routing(kind, LAYERS, EXPERTS, TOP_K, seed)
    return np.array([next(choices) for _ in range(tokens)])


def uses_of(choices: np.ndarray) -> np.ndarray:
    """[layers, experts], in each layer the least used first."""
    return np.sort([np.bincount(layer.ravel(), minlength=EXPERTS) for layer in choices.swapaxes(0, 1)])


def gini(uses: np.ndarray) -> np.ndarray:
    """Of each layer: 0 if all experts are used alike, near 1 if few do everything."""
    return (2 * np.arange(1, EXPERTS + 1) - EXPERTS - 1) @ uses.T / (EXPERTS * uses.sum(1))


def repeats(choices: np.ndarray) -> float:
    """Share of the choices that the previous token has as well."""
    return (choices[1:, :, :, None] == choices[:-1, :, None, :]).any(3).mean()


@pytest.mark.parametrize("seed", [0, 1])
def test_published(seed):
    choices = chosen(Kind.PUBLISHED, seed)
    uses = uses_of(choices)
    skew = gini(uses)
    assert skew.mean() == pytest.approx(0.65, abs=0.02)
    assert skew[-10:].mean() > skew[:10].mean() + 0.1
    assert (uses[:, -27:].sum(1) / uses.sum(1)).mean() == pytest.approx(0.5, abs=0.03)
    assert repeats(choices) == pytest.approx(0.35, abs=0.01)


def test_turns_have_hot_experts_of_their_own():
    """Of two stretches of 50 tokens the 16 most used are mostly the same, or (of another class) hardly any."""
    choices = chosen(Kind.PUBLISHED, seed=0)
    tops = [
        [set(np.argsort(-np.bincount(layer.ravel(), minlength=EXPERTS))[:16].tolist()) for layer in part.swapaxes(0, 1)]
        for part in np.split(choices[: TOKENS // 50 * 50], TOKENS // 50)
    ]
    shares = [
        np.mean([len(a & b) / len(a | b) for a, b in zip(tops[i], tops[j], strict=True)])
        for i in range(len(tops))
        for j in range(i)
    ]
    near, far = [share for share in shares if share > 0.3], [share for share in shares if share < 0.1]
    assert len(near) + len(far) > 0.7 * len(shares)  # the rest have a change of turns within
    assert np.median(far) < 0.07
    assert len(near) > 0.1 * len(shares)


def test_uniform():
    choices = chosen(Kind.UNIFORM, seed=0, tokens=1000)
    assert repeats(choices) == pytest.approx(TOP_K / EXPERTS, abs=0.002)
    assert gini(uses_of(choices)).max() < 0.15


@pytest.mark.parametrize("kind", Kind)
def test_choices_are_distinct_and_the_seed_decides(kind):
    choices = chosen(kind, seed=3, tokens=20)
    assert (np.diff(np.sort(choices)) > 0).all()
    assert choices.min() >= 0
    assert choices.max() < EXPERTS
    assert (choices == chosen(kind, seed=3, tokens=20)).all()
    assert (choices != chosen(kind, seed=4, tokens=20)).any()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, *map(str, arguments)], capture_output=True, text=True)


def test_the_program(tmp_path):
    file = tmp_path / "a.trace"
    options = ("--layers", 3, "--experts", 16, "--top-k", 4, "--tokens", 30, "--kind", "published", "--seed", 5)
    done = run(file, *options)
    assert done.returncode == 0, done.stderr
    trace = read_trace(file)
    assert trace.experts.shape == (30, 3, 4)
    assert (trace.header.model, trace.header.expert_nbytes) == ("synthetic, published", EXPERT_NBYTES)
    choices = routing(Kind.PUBLISHED, 3, 16, 4, seed=5)
    assert trace.experts.tolist() == [next(choices).tolist() for _ in range(30)]
    again = run(file, *options)
    assert again.returncode == 2
    assert "something already" in again.stderr


def test_the_bundled_trace_is_what_this_program_writes():
    """Its first tokens, by the command that stands in bench_simulate.py."""
    trace = read_trace(BUNDLED)
    assert trace.experts.shape == (800, LAYERS, TOP_K)
    assert trace.header == TraceHeader("synthetic, published", tuple(range(LAYERS)), EXPERTS, TOP_K, EXPERT_NBYTES)
    assert trace.experts[:50].tolist() == chosen(Kind.PUBLISHED, seed=0, tokens=50).tolist()


def test_more_than_all_experts_are_refused(tmp_path):
    done = run(tmp_path / "a.trace", "--experts", 4)
    assert done.returncode == 2
    assert "out of range" in done.stderr
