"""The plan for the real 35B, from headers alone: sparse files with the published names, shapes and sizes."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mosaic.convert.cli import app
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.format import architectures
from mosaic.format.layout import PAGE
from mosaic.format.source import Checkpoint
from mosaic.format.tensors import Role
from support.configs import MOE_30B, NEXT_80B
from support.listing import Entry, load_listing, pack, total_bytes, write_sparse_checkpoint

LANGUAGE = "model.language_model.layers."

#: MODEL-SPEC 4.2, FP8-release column, by (roles, part).
SIZES = {
    ("routed_experts", "decoder"): 32_216_186_880,
    ("linear_attention", "decoder"): 1_006_755_840,
    ("convolution", "decoder"): 1_966_080,
    ("attention", "decoder"): 272_663_040,
    ("shared_expert", "decoder"): 125_844_480,
    ("router", "decoder"): 41_943_040,
    ("embedding", "outside"): 1_017_118_720,
    ("lm_head", "outside"): 1_017_118_720,
    ("routed_experts", "mtp"): 805_404_672,
    ("vision", "vision"): 893_142_496,
}


@pytest.fixture(scope="module", params=["3.6", "3.5"])
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("listing") / request.param
    config, files, total = load_listing(request.param)
    write_sparse_checkpoint(folder, config, files, total)
    return folder


@pytest.fixture(scope="module")
def plan(source):
    with Checkpoint(source) as checkpoint:
        yield make_plan(checkpoint, load_recipe("e4m3"))


def test_total_is_the_published_one(plan, source):
    extra = 9_600 if source.name == "3.5" else 0  # 30 x (32 + 128) F32 instead of BF16
    assert plan.tensor_bytes == 37_454_789_472 + extra
    assert plan.index["metadata"]["total_size"] == plan.tensor_bytes


def test_sizes_by_class(plan):
    sizes: Counter[tuple[str, str]] = Counter()
    for planned in plan.tensors:
        spec, stored = planned.stored.spec, planned.stored
        sizes[spec.role, spec.part] += stored.weight.nbytes + (stored.scale.nbytes if stored.scale else 0)
    assert {key: sizes[key] for key in SIZES} == SIZES


def test_shards_are_the_official_ones(plan, source):
    counts = {shard.layout.file: len(shard.layout.entries) for shard in plan.shards}
    full = {f"layers-{layer:02d}.safetensors" for layer in range(3, 40, 4)}
    expected = {f"layers-{layer:02d}.safetensors": 1_558 for layer in range(40)} | dict.fromkeys(full, 1_556)
    assert counts == expected | {"outside.safetensors": 336, "mtp.safetensors": 1_560}
    assert sum(counts.values()) == 64_196
    if source.name == "3.6":  # tensor bytes of a shard: MODEL-SPEC 2.3
        sizes = {shard.layout.file: sum(entry.nbytes for entry in shard.layout.entries) for shard in plan.shards}
        assert sizes["layers-00.safetensors"] == 843_498_240
        assert sizes["layers-03.safetensors"] == 836_878_976
        assert sizes["mtp.safetensors"] == 853_668_480
        assert sizes["outside.safetensors"] == 2_927_384_032


def test_every_expert_span_is_page_aligned_and_contiguous(plan):
    spans = 0
    for shard in plan.shards:
        assert len(shard.layout.header) % PAGE == 0
        experts: dict[int, list[tuple[int, int]]] = {}
        scales: dict[int, list[tuple[int, int]]] = {}
        for planned in shard.tensors:
            if planned.stored.spec.role is Role.ROUTED_EXPERTS:
                weight, scale, number = planned.stored.weight, planned.stored.scale, planned.stored.spec.expert
                experts.setdefault(number, []).append((shard.layout.offsets[weight.name], weight.nbytes))
                scales.setdefault(number, []).append((shard.layout.offsets[scale.name], scale.nbytes))
        for pieces in (*experts.values(), *scales.values()):
            for (offset, nbytes), (following, _) in pairwise(pieces):
                assert offset + nbytes == following
        for pieces in experts.values():
            assert pieces[0][0] % PAGE == 0
            assert sum(nbytes for _, nbytes in pieces) == 3 << 20
            spans += 1
    assert spans == 41 * 256


def test_skip_list_is_the_official_one(plan):
    """MODEL-SPEC 2.3: the content of the official modules_to_not_convert."""
    skip = plan.config["quantization_config"]["modules_to_not_convert"]
    assert len(skip) == len(set(skip))
    both = ("input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.shared_expert_gate")
    linear = ("A_log", "conv1d", "dt_bias", "in_proj_a", "in_proj_b", "in_proj_ba", "norm")
    expected = {"lm_head", "model.embed_tokens"}
    for layer in range(40):
        expected |= {f"{LANGUAGE}{layer}.{name}" for name in both}
        mixer = ("self_attn.q_norm", "self_attn.k_norm") if layer % 4 == 3 else [f"linear_attn.{n}" for n in linear]
        expected |= {f"{LANGUAGE}{layer}.{name}" for name in mixer}
    mtp = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    expected |= {f"mtp.{name}" for name in mtp} | {f"mtp.layers.0.{name}" for name in both}
    expected |= {"mtp.layers.0.self_attn.q_norm", "mtp.layers.0.self_attn.k_norm"}
    for block in range(27):
        names = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
        expected |= {f"model.visual.blocks.{block}.{name}" for name in names}
    expected |= {f"model.visual.merger.{name}" for name in ("norm", "linear_fc1", "linear_fc2")}
    expected |= {"model.visual.patch_embed.proj", "model.visual.pos_embed"}
    assert set(skip) == expected


def test_plan_reads_headers_only(source, tmp_path):
    before = read_bytes()
    result = CliRunner().invoke(app, [str(source), str(tmp_path / "out"), "--plan"])
    assert result.exit_code == 0, result.output
    assert "37,454,7" in result.output
    # Headers, config, index, recipe, and modules Python loads late: 1.8 MB seen. One expert alone has 6.3 MB.
    assert read_bytes() - before < 4_000_000
    assert not (tmp_path / "out").exists()


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(
    ("config", "bf16", "fp8"),
    [(NEXT_80B, 162_649_725_440, 82_023_025_792), (MOE_30B, 61_064_245_248, 31_170_895_872)],
    ids=["80B", "30B"],
)
def test_other_families_have_the_computed_totals(config, bf16, fp8, tmp_path):
    """MODEL-SPEC 4.2, last paragraph. The names come from the contract itself here; the totals do not."""
    architecture = architectures.find(config, tmp_path)
    spec = architecture.parse(config, tmp_path)
    names = ["mtp."] if config["model_type"] == "qwen3_next" else []
    pieces = {tensor.pieces[-1].name: tensor.pieces[-1] for tensor in architecture.tensors(spec, config, names)}
    files = pack([Entry(name, "BF16", piece.shape) for name, piece in pieces.items()], "model", 41)
    assert total_bytes(files) == bf16
    write_sparse_checkpoint(tmp_path / "source", config, files, bf16)
    with Checkpoint(tmp_path / "source") as checkpoint:
        assert make_plan(checkpoint, load_recipe("e4m3")).tensor_bytes == fp8
