"""The test support judged by transformers: are the tiny checkpoints legal, sane and able to show a mistake?

Not a test of Mosaic, of which nothing is imported. If something here fails, failures elsewhere mean nothing.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from support import fp8, listing, oracle
from support.tiny import Tiny, build_tensors, write_checkpoint, write_tokenizer

TINIES = {
    "qwen3_6": Tiny(),
    "qwen3_6_per_expert": Tiny(experts_layout="per_expert"),
    "qwen3_5": Tiny(variant="3.5"),
    "qwen3_5_strong": Tiny(variant="3.5", decay="strong", visual=False, mtp=False, shards=1),
    "qwen3_6_tied": Tiny(tie=True, dtype="float32"),
    "qwen3_next": Tiny(family="qwen3_next"),
    "qwen3_next_dense": Tiny(family="qwen3_next", mlp_only_layers=(1,), norm_topk_prob=False, dtype="float16"),
    "qwen3_moe": Tiny(family="qwen3_moe"),
    "qwen3_moe_unnormalised": Tiny(family="qwen3_moe", norm_topk_prob=False),
}
IDS = np.random.default_rng(1).integers(0, 256, 200)


class Release(NamedTuple):
    tiny: Tiny
    folder: Path
    fp8_folder: Path
    trace: oracle.Trace  # of the BF16 folder, over IDS


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """Each checkpoint written, quantised and run once, on demand."""
    root = tmp_path_factory.mktemp("releases")
    made: dict[str, Release] = {}

    def make(name: str) -> Release:
        if name not in made:
            folder, fp8_folder = root / name, root / f"{name}-fp8"
            write_checkpoint(TINIES[name], folder)
            fp8.write_official_fp8(folder, fp8_folder)
            made[name] = Release(TINIES[name], folder, fp8_folder, oracle.trace(oracle.load(folder), IDS))
        return made[name]

    return make


@pytest.mark.parametrize("name", TINIES)
def test_checkpoint_is_legal_and_sane(releases, name):
    tiny, _, _, trace = releases(name)  # loading asserted that every key found its place
    assert trace.logits.shape == (len(IDS), tiny.vocab)
    assert 1.5 < trace.logits.std() < 2.5
    assert all(np.sqrt(np.mean(state**2)) < 5 for state in trace.hidden_states)
    assert len(set(trace.logits.argmax(-1))) > 50  # it does not say the same thing all the time


@pytest.mark.parametrize("name", TINIES)
def test_routing_uses_every_expert_and_avoids_ties(releases, name):
    tiny, _, _, trace = releases(name)
    assert len(trace.router_logits) == tiny.layers - len(tiny.mlp_only_layers)
    for router in trace.router_logits:  # [T, E]
        ranked = np.sort(router, axis=-1)[:, ::-1]
        chosen = np.argsort(-router, axis=-1)[:, : tiny.top_k]
        assert len(np.unique(chosen)) == tiny.experts
        # Runtimes differ by about 1e-5 here, and few tokens may then lie close enough to choose another expert.
        assert np.quantile(ranked[:, tiny.top_k - 1] - ranked[:, tiny.top_k], 0.02) > 1e-3


@pytest.mark.parametrize("name", TINIES)
def test_fp8_release_is_the_dequantised_checkpoint(releases, name):
    """Loading an FP8 folder must be loading its codes times its scales, every block of every matrix."""
    release = releases(name)
    loaded = oracle.load(release.fp8_folder).state_dict()
    stored = fp8.read_checkpoint(release.fp8_folder)
    matrices = [key for key in stored if f"{key}_scale_inv" in stored and not key.startswith("mtp.")]
    assert matrices
    for key in matrices:
        expected = fp8.dequantise(stored[key], stored[f"{key}_scale_inv"])
        assert torch.equal(_loaded_matrix(loaded, key), expected), key
    large = {key for key, tensor in stored.items() if tensor.ndim == 2 and min(tensor.shape) >= 128}
    exempt = ("embed_tokens", "lm_head", "mtp.fc", "visual")
    assert all(any(part in key for part in exempt) for key in large - {*matrices} if "mtp.layers" not in key)


def test_scales_of_either_dtype_load(releases, tmp_path):
    release = releases("qwen3_6")
    fp8.write_official_fp8(release.folder, tmp_path / "wide", scale_dtype=torch.float32)
    wide = oracle.logits(oracle.load(tmp_path / "wide"), IDS[:32])
    narrow = oracle.logits(oracle.load(release.fp8_folder), IDS[:32])
    assert wide.std() == pytest.approx(narrow.std(), rel=0.1)
    assert not np.array_equal(wide, narrow)


def test_layouts_and_families_hold_the_same_function(releases):
    fused = releases("qwen3_6").trace.logits
    np.testing.assert_array_equal(releases("qwen3_6_per_expert").trace.logits, fused)
    np.testing.assert_array_equal(releases("qwen3_next").trace.logits, fused)


def test_multimodal_class_agrees_on_text(releases):
    release = releases("qwen3_5")
    model = oracle.load(release.folder, text_only=False)
    np.testing.assert_array_equal(oracle.logits(model, IDS), release.trace.logits)


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3_5_strong", "qwen3_moe"])
def test_decoding_through_the_cache_continues_the_full_pass(releases, name):
    """The bound is the one that MODEL-SPEC gives for float32: 1e-4 on logits of about 10."""
    model = oracle.load(releases(name).folder)
    prompt = [int(i) for i in IDS[:70]]  # longer than one GDN chunk
    tokens, steps = oracle.decode(model, prompt, 6)
    full = oracle.logits(model, prompt + tokens)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(steps, full, atol=1e-4)
    assert oracle.greedy(model, prompt, 3) == tokens[:3]


def test_strong_decay_goes_from_memory_to_none():
    tensors = build_tensors(TINIES["qwen3_5_strong"])
    p = "model.language_model.layers.0.linear_attn"
    rate = tensors[f"{p}.A_log"].exp() * torch.nn.functional.softplus(tensors[f"{p}.dt_bias"].float())
    kept = torch.exp(-rate)  # per head, where in_proj_a gives 0
    assert kept.max() > 0.99
    assert kept.min() == 0.0  # underflows in float32
    assert ((kept > 0.01) & (kept < 0.9)).any()


@pytest.mark.parametrize("name", TINIES)
def test_block_scales_differ_widely(releases, name):
    release = releases(name)
    stored = fp8.read_checkpoint(release.fp8_folder)
    scales = {key: tensor.float() for key, tensor in stored.items() if key.endswith("_scale_inv")}
    for key, scale in scales.items():  # side by side: one step of 2 at least, less the noise of two maxima
        assert (scale[:, 1:] / scale[:, :-1]).log2().abs().gt(0.5).all(), key
    base = "model.language_model" if release.tiny.nested else "model"
    for layer in set(range(release.tiny.layers)) - set(release.tiny.mlp_only_layers):
        kinds = {}
        for kind in ("gate_proj", "up_proj", "down_proj"):
            p = f"{base}.layers.{layer}.mlp.experts"
            of = [scales[f"{p}.{e}.{kind}.weight_scale_inv"] for e in range(release.tiny.experts)]
            kinds[kind] = torch.stack(of).flatten(1)  # [E, blocks]
            steps = (kinds[kind][1:] / kinds[kind][:-1]).log2().abs()
            assert steps.max(dim=1).values.gt(0.5).all(), (layer, kind)  # no two neighbours share their scales
            assert steps.median() > 0.9, (layer, kind)
        everything = torch.cat(list(kinds.values()), dim=1)
        assert everything.max() / everything.min() > 256
        patterns = [(scale[:, 1] / scale[:, 0]).log2().round() for scale in kinds.values()]
        for i, one in enumerate(patterns):
            for other in patterns[i + 1 :]:
                assert (one != other).float().mean() > 0.5  # gate, up and down have patterns of their own


@pytest.mark.parametrize("kind", ["gate_proj", "up_proj", "down_proj"])
def test_mixed_up_scales_show(releases, tmp_path, kind):
    """Swap the scales of two neighbouring experts in one layer of four: the logits must move a lot."""
    release = releases("qwen3_6")
    right = oracle.logits(oracle.load(release.fp8_folder), IDS)
    (tmp_path / "swapped").mkdir()
    for file in release.fp8_folder.iterdir():
        (tmp_path / "swapped" / file.name).symlink_to(file)
    path = tmp_path / "swapped" / "layers-1.safetensors"
    with safe_open(path, framework="pt") as shard:
        tensors = {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118 (not a mapping)
    one, other = (f"model.language_model.layers.1.mlp.experts.{e}.{kind}.weight_scale_inv" for e in (4, 5))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    moved = np.abs(oracle.logits(oracle.load(tmp_path / "swapped"), IDS) - right)
    assert moved.max() > 1.0
    assert np.median(moved.max(axis=1)) > 0.1  # most tokens, not only those that use the two experts


def test_published_quirks_are_there(releases):
    old, new = releases("qwen3_5"), releases("qwen3_6")
    dtypes = {name: tensor.dtype for name, tensor in fp8.read_checkpoint(old.folder).items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert len(wide) == 6
    assert all(name.endswith((".A_log", ".linear_attn.norm.weight")) for name in wide)
    assert "mtp.layers.0.mlp.experts.15.up_proj.weight" in dtypes
    assert "model.language_model.layers.3.mlp.experts.gate_up_proj" in dtypes
    assert (old.folder / "model.safetensors-00002-of-00003.safetensors").exists()
    assert {tensor.dtype for tensor in fp8.read_checkpoint(new.folder).values()} == {torch.bfloat16}
    indices = (json.loads((release.folder / "model.safetensors.index.json").read_text()) for release in (old, new))
    assert [type(index["metadata"]["total_size"]) for index in indices] == [int, float]
    skipped = json.loads((new.fp8_folder / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.language_model.layers.0.linear_attn.in_proj_ba"} <= set(skipped)
    assert not any("experts." in module for module in skipped)


def test_weights_depend_on_name_and_seed_alone():
    few, many = build_tensors(Tiny(layers=2, mtp=False, visual=False)), build_tensors(Tiny(layers=4))
    assert set(few) < set(many)
    assert all(torch.equal(few[name], many[name]) for name in few)
    assert not torch.equal(build_tensors(Tiny(seed=1))["lm_head.weight"], many["lm_head.weight"])


def test_options_are_checked():
    with pytest.raises(ValueError, match="family"):
        Tiny(family="qwen4")
    with pytest.raises(ValueError, match="mlp_only_layers"):
        Tiny(mlp_only_layers=(1,))


def test_tokenizer_round_trips_and_renders_chatml(tmp_path):
    from transformers import AutoTokenizer

    write_checkpoint(Tiny(layers=1, mtp=False, visual=False), tmp_path)
    write_tokenizer(tmp_path, 512)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße, 世界 \x00 123<|im_end|>\n<think>"
    ids = tokenizer(text)["input_ids"]
    assert ids[:3] == [*b"Gr", "ü".encode()[0]]
    assert ids[-3:] == [258, 10, 259]
    assert tokenizer.decode(ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("variant", "shards", "tensors", "total"),
    [("3.6", 26, 1_045, 71_903_645_408), ("3.5", 14, 1_811, 71_903_655_008)],
)
def test_listing_has_the_published_counts(tmp_path, variant, shards, tensors, total):
    config, files, published = listing.load_listing(variant)
    entries = [entry for shard in files.values() for entry in shard]
    assert (len(files), len(entries), published, listing.total_bytes(files)) == (shards, tensors, total, total)
    assert len({entry.name for entry in entries}) == tensors
    assert sum(math.prod(entry.shape) for entry in entries) == 35_951_822_704
    listing.write_sparse_checkpoint(tmp_path, config, files, published)
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) < 2**22
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > total
    for file, shard in files.items():
        with safe_open(tmp_path / file, framework="np") as opened:  # the library accepts header and file size
            assert {e.name: list(e.shape) for e in shard} == {
                key: opened.get_slice(key).get_shape()
                for key in opened.keys()  # noqa: SIM118 (not a mapping)
            }
    if variant == "3.6":
        digest = hashlib.sha256((tmp_path / "config.json").read_bytes()).hexdigest()
        assert digest == "93a4693fa9d8392fbfccd4b3c9873f4bfdcb14fdede978b123d07d19675efe99"


def _loaded_matrix(loaded: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """The matrix of an FP8 release's `key` in the text model, whose experts are fused in memory."""
    key = key.replace("model.language_model.", "model.")
    if ".mlp.experts." not in key:
        return loaded[key]
    experts, e, kind, _ = key.rsplit(".", 3)
    if kind == "down_proj":
        return loaded[f"{experts}.down_proj"][int(e)]
    return loaded[f"{experts}.gate_up_proj"][int(e)].chunk(2)[kind == "up_proj"]
