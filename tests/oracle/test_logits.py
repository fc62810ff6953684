"""The runtime against transformers, on the same converted directory, dequantised, in float32 with float32 KV."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.kv import KVCache, KVFormat
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import Weights
from support import oracle
from support.fp8 import write_official_fp8
from support.models import convert_folder, dequantised, read_tensors
from support.tiny import Tiny, write_checkpoint

MODELS = {
    "3.6": Tiny(),
    "3.5": Tiny(variant="3.5"),
    "3.6-strong-decay": Tiny(decay="strong", seed=1),
    "3.6-tied": Tiny(tie=True),
    "next": Tiny(family="qwen3_next"),
    "next-strong-decay": Tiny(family="qwen3_next", decay="strong", seed=2),
    "next-not-normalised": Tiny(family="qwen3_next", norm_topk_prob=False),
    "moe": Tiny(family="qwen3_moe"),
    "moe-not-normalised": Tiny(family="qwen3_moe", norm_topk_prob=False),
    "moe-dense-layer": Tiny(family="qwen3_moe", mlp_only_layers=(1,)),
    "demo": None,
}
FP8 = ("3.6", "3.5", "3.6-strong-decay", "next", "moe")
CASES = (
    [(name, "bf16") for name in MODELS] + [(name, "fp8") for name in FP8] + [("next", "fp8-f32"), ("moe", "fp8-f32")]
)
LENGTHS = (1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129)
LOGITS = 1e-4  # float32 round-off in transformers (ours is float64), |logits| up to 20; up to 6.3e-5 seen
STATE = 1e-6  # float64 against itself: only a float32 rounding in the KV cache can flip; 1e-13 seen


class Case:
    """One converted model, ours and the oracle's."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.model = HybridModel(Weights(folder), ReferenceOps(), KVFormat.F32)
        self.oracle = oracle.load(folder)
        rng = np.random.default_rng(7)
        self.ids = rng.integers(0, self.model.spec.vocab_size - 16, max(LENGTHS)).tolist()

    def run(self, *pieces: list[int]):
        """Logits of all tokens when fed piece by piece, and the state after them."""
        state = self.model.new_sequence()
        parts = [self.model.logits(self.model.hidden(piece, state)) for piece in pieces if piece]
        return torch.cat(parts).numpy(), state


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request, tmp_path_factory):
    name, kind = request.param
    root = tmp_path_factory.mktemp(f"{name}-{kind}")
    source = DEMO_CHECKPOINT if name == "demo" else root / "source"
    if name != "demo":
        write_checkpoint(MODELS[name], source)
    if kind != "bf16":
        scale_dtype = torch.float32 if kind == "fp8-f32" else torch.bfloat16
        write_official_fp8(source, root / "official", scale_dtype)
        source = root / "official"
    return Case(convert_folder(source, root / "out"))


def test_logits_at_every_length(case):
    for length in LENGTHS:
        ours, _ = case.run(case.ids[:length])
        theirs = oracle.logits(case.oracle, case.ids[:length])
        assert np.abs(ours - theirs).max() <= LOGITS, length


@pytest.mark.parametrize("length", [2, 65])
def test_greedy_tokens(case, length):
    prompt, tokens = case.ids[:length], []
    logits, state = case.run(prompt)
    for _ in range(64):
        tokens.append(int(logits[-1].argmax()))
        logits = case.model.logits(case.model.hidden(tokens[-1:], state)).numpy()
    assert tokens == oracle.greedy(case.oracle, prompt, 64)


def test_any_split_of_the_prompt_is_the_same(case):
    whole, state = case.run(case.ids)
    for cuts in ((1,), (2, 5), (31, 32), (63,), (64, 128), (65, 66, 67), (17, 40, 100)):
        edges = (0, *cuts, len(case.ids))
        split, other = case.run(*(case.ids[a:b] for a, b in pairwise(edges)))
        assert np.abs(split - whole).max() <= STATE, cuts
        compare_states(state, other)


def test_token_by_token_is_the_same(case):
    whole, state = case.run(case.ids)
    steps, other = case.run(*([token] for token in case.ids))
    assert np.abs(steps - whole).max() <= STATE
    compare_states(state, other)


def compare_states(one, other, bound=STATE):
    assert one.length == other.length
    for mine, yours in zip(one.layers, other.layers, strict=True):
        if isinstance(mine, KVCache):
            pairs = zip(mine.read(), yours.read(), strict=True)
        else:
            assert isinstance(mine, DeltaState)
            pairs = ((mine.conv, yours.conv), (mine.recurrent, yours.recurrent))
        for left, right in pairs:
            assert (left.double() - right.double()).abs().max() <= bound


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "bf16") for name in ("3.6", "3.5", "next", "moe", "demo")), ("3.6", "fp8"), ("next", "fp8")],
)
def test_transformers_loads_the_directory_as_it_is(name, kind, tmp_path):
    """No options, no missing, unexpected or mismatched keys; and its weights are our dequantisation, to the bit."""
    from transformers import AutoModelForCausalLM

    source = DEMO_CHECKPOINT if name == "demo" else tmp_path / "source"
    if name != "demo":
        write_checkpoint(MODELS[name], source)
    if kind == "fp8":
        write_official_fp8(source, tmp_path / "official")
        source = tmp_path / "official"
    out = convert_folder(source, tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    strays = {kind: {key for key in map(str, keys) if not key.startswith("mtp.")} for kind, keys in report.items()}
    assert not any(strays.values()), strays
    weights = dequantised(read_tensors(out))
    seen = 0
    for key, tensor in model.state_dict().items():
        for ours, part in expected(key.removeprefix("model."), tensor, weights):
            assert torch.equal(ours, part), key
            seen += 1
    assert seen == sum(not key.startswith(("mtp.", "model.visual.")) for key in weights)


def expected(key, tensor, weights):
    """(our tensor, the loaded one) pairs that a parameter of the loaded model consists of."""
    prefix = next(p for p in ("model.language_model.", "model.", "") if f"{p}embed_tokens.weight" in weights)

    @cache
    def ours(name):
        return weights[name] if name in weights else weights[prefix + name]

    if key.endswith("experts.gate_up_proj"):
        stem = key.removesuffix("gate_up_proj")
        for number, matrix in enumerate(tensor):
            gate, up = matrix.chunk(2)
            yield ours(f"{stem}{number}.gate_proj.weight"), gate
            yield ours(f"{stem}{number}.up_proj.weight"), up
    elif key.endswith("experts.down_proj"):
        for number, matrix in enumerate(tensor):
            yield ours(f"{key.removesuffix('down_proj')}{number}.down_proj.weight"), matrix
    else:
        yield ours(key), tensor


def test_kv_formats_stay_close(tmp_path):
    """bfloat16 and E4M3 caches change attention inputs by at most 2^-9 and 2^-4 relatively: logits move, a little."""
    write_checkpoint(Tiny(), tmp_path / "source")
    weights = Weights(convert_folder(tmp_path / "source", tmp_path / "out"))
    ids = np.random.default_rng(3).integers(0, 256, 80).tolist()
    results = {}
    for kv in KVFormat:
        model = HybridModel(weights, ReferenceOps(), kv)
        results[kv] = model.logits(model.hidden(ids, model.new_sequence()))
    exact = results[KVFormat.F32]
    distances = {kv: (result - exact).abs().mean().item() for kv, result in results.items()}
    assert 0 < distances[KVFormat.BF16] < distances[KVFormat.E4M3] < 0.2 * exact.std().item()
