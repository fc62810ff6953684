"""mosaic-eval's numbers against transformers': perplexity of converted models, KL divergence from their checkpoints."""

import math

import numpy as np
import pytest

from mosaic.recipes import DEMO_CHECKPOINT, FOLDER
from mosaic.runtime import evaluate
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.ops.choice import OpsName, make_ops
from mosaic.runtime.scoring import perplexity, windows_of
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.weights import Weights
from oracle.test_cpu_logits import ORACLE
from oracle.test_logits import MODELS
from support import oracle
from support.fp8 import write_official_fp8
from support.models import convert_folder
from support.tiny import write_checkpoint

CASES = [
    *((name, "bf16") for name in ("3.6", "3.6-tied", "next", "moe-dense-layer", "demo")),
    ("3.6", "fp8"),
]
# A logit is off by at most ORACLE, so a log-probability by twice that: its own logit, and their log-sum-exp.
NATS = 2 * ORACLE


def log_softmax(logits):
    values = logits.astype(np.float64)
    values = values - values.max(axis=1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))


class Oracle:
    """What transformers makes of windows, in float64 from its float32 logits."""

    def __init__(self, folder, windows):
        model = oracle.load(folder)
        self.log_probabilities = log_softmax(np.concatenate([oracle.logits(model, window[:-1]) for window in windows]))

    def nll(self, windows):
        targets = [token for window in windows for token in window[1:]]
        return -self.log_probabilities[np.arange(len(targets)), targets]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, tmp_path_factory):
    """(scores, windows, transformers on the model directory, transformers on the reference)."""
    name, kind = request.param
    root = tmp_path_factory.mktemp(f"{name}-{kind}")
    source = DEMO_CHECKPOINT if name == "demo" else root / "source"
    if name != "demo":
        write_checkpoint(MODELS[name], source)
    out = convert_folder(source, root / "out")
    if kind == "fp8":
        write_official_fp8(source, root / "official")
        source = root / "official"
    ops = make_ops(OpsName.CPU)
    this = evaluate.open_model(Weights(out), ops, KVFormat.F32)
    reference = evaluate.open_reference(source, ops, KVFormat.F32)
    if name == "demo":
        tokens = Tokenizer(out).encode((FOLDER / "demo" / "heldout" / "bible.txt").read_text())[:600]
    else:
        tokens = np.random.default_rng(7).integers(0, this.weights.spec.vocab_size - 16, 300).tolist()
    windows = windows_of(tokens, 256)
    text = evaluate.Text("text", "", tokens)
    scores = evaluate.scores_of(text, 256, this, reference, lambda title, steps: lambda count: None)
    return scores, windows, Oracle(out, windows), Oracle(source, windows)


def test_likelihoods_and_perplexity(case):
    scores, windows, *oracles = case
    for found, theirs in zip((scores.nll, scores.compared.nll), oracles, strict=True):
        nll = theirs.nll(windows)
        assert np.abs(found - nll).max() <= NATS
        assert perplexity(found).value == pytest.approx(math.exp(nll.mean()), rel=1.01 * NATS)


def test_divergence(case):
    """sum of q (log q - log p): each log is off by NATS at most, and q by that share of itself."""
    scores, _, this, reference = case
    p, q = this.log_probabilities, reference.log_probabilities
    exact = (np.exp(q) * (q - p)).sum(axis=1)
    spread = (np.exp(q) * np.abs(q - p)).sum(axis=1)
    bound = 1.01 * NATS * (spread + 2)
    assert (np.abs(scores.compared.divergence - exact) <= bound).all()
    assert exact.mean() > bound.mean()  # there is something to be measured


def test_likeliest_tokens(case):
    """The same, but where two are closer together than the models are to their oracles."""
    scores, _, this, reference = case
    p, q = this.log_probabilities, reference.log_probabilities
    margins = [np.diff(np.sort(values, axis=1)[:, -2:])[:, 0] for values in (p, q)]
    sure = np.minimum(*margins) > 2 * NATS
    same = p.argmax(axis=1) == q.argmax(axis=1)
    assert np.array_equal(scores.compared.same_top[sure], same[sure])
    assert sure.mean() > 0.95


@pytest.mark.parametrize("name", ["3.6", "next", "moe"])
def test_a_model_is_no_way_from_itself(name, tmp_path):
    """Exactly; and states are the same, of whichever of two like directories."""
    write_checkpoint(MODELS[name], tmp_path / "source")
    out, other = (convert_folder(tmp_path / "source", tmp_path / folder) for folder in ("out", "other"))
    ops = make_ops(OpsName.CPU)
    opened = [evaluate.open_reference(folder, ops, KVFormat.BF16) for folder in (out, other)]
    text = evaluate.Text("text", "", list(range(100)) * 2)
    scores = evaluate.scores_of(text, 64, *opened, lambda title, steps: lambda count: None)
    assert not scores.compared.divergence.any()
    assert np.array_equal(scores.nll, scores.compared.nll)
    assert scores.compared.same_top.all()


def test_unquantised_experts_are_those_of_their_checkpoint(tmp_path):
    """Nothing converted: the model directory and the checkpoint, fused there, are the same function to the bit."""
    write_checkpoint(MODELS["3.6"], tmp_path / "source")
    (tmp_path / "keep.yaml").write_text("rules: [{treatment: keep}]")
    out = convert_folder(tmp_path / "source", tmp_path / "out", str(tmp_path / "keep.yaml"))
    ops = make_ops(OpsName.CPU)
    opened = [evaluate.open_reference(folder, ops, KVFormat.BF16) for folder in (out, tmp_path / "source")]
    text = evaluate.Text("text", "", list(range(150)))
    scores = evaluate.scores_of(text, 100, *opened, lambda title, steps: lambda count: None)
    assert not scores.compared.divergence.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["austen", "bible"])
def test_the_demo_on_its_heldout_text(tmp_path, name):
    """All of it: transformers' perplexities, and E4M3 costs less than 0.5 % (recipes/demo/README.md)."""
    out = convert_folder(DEMO_CHECKPOINT, tmp_path / "out")
    ops = make_ops(OpsName.CPU)
    opened = [evaluate.open_reference(folder, ops, KVFormat.F32) for folder in (out, DEMO_CHECKPOINT)]
    text = evaluate.read_text(FOLDER / "demo" / "heldout" / f"{name}.txt", Tokenizer(out), 4096, None)
    scores = evaluate.scores_of(text, 256, *opened, lambda title, steps: lambda count: None)
    found = evaluate.evaluation(text, 256, scores, opened[1], ("cpu", "f32", "f32"))
    print(found)
    windows = windows_of(text.tokens, 256)
    for folder, ours in ((out, found.perplexity), (DEMO_CHECKPOINT, found.comparison.perplexity)):
        theirs = math.exp(Oracle(folder, windows).nll(windows).mean())
        print(theirs, ours.value / theirs - 1)
        assert ours.value == pytest.approx(theirs, rel=1.01 * NATS)
    assert abs(found.comparison.ratio.value - 1) < 5e-3
    assert 0 < found.comparison.divergence.mean < 0.01
