"""The benchmark models are legal in every form, and all forms hold the same model; here with small matrices."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import checks, make_model, sparse, sparse_source
from bench.random_weights import RandomWeights
from bench.shape import fused, model_config
from bench.write_model import write_model
from bench.write_source import write_source
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.convert.verify import verify
from mosaic.format import e4m3
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint
from mosaic.format.tensors import Piece
from support.models import convert_folder, dequantised, read_tensors

SIZES = {
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
CONFIG = model_config(3, 512, SIZES)
SEED = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "model"
    write_model(out, CONFIG, SEED, quiet=True)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("source")
    write_source(out, CONFIG, SEED, quiet=True)
    return out


def everything(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def fingerprint(folder: Path) -> str:
    with Checkpoint(folder) as checkpoint:
        return make_plan(checkpoint, load_recipe("e4m3")).fingerprint


def held(folder: Path) -> int:
    return sum(512 * file.stat().st_blocks for file in folder.glob("*.safetensors"))


def test_the_true_shape():
    text = model_config(10, 248320)["text_config"]
    kinds = ["full_attention" if layer in (3, 7, 9) else "linear_attention" for layer in range(10)]
    assert text["layer_types"] == kinds
    assert (text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]) == (2048, 256, 512)
    shapes = {weight.name: weight.shape for weight in fused(model_config(40, 248320))}
    assert len(shapes) == 693
    assert 2 * sum(map(np.prod, shapes.values())) == 69_321_221_376
    assert shapes["model.language_model.layers.39.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert model_config(1, 512)["text_config"]["layer_types"] == ["full_attention"]


def test_model_is_sound(model):
    assert [result for result in verify(model) if not result.holds] == []
    assert not [path for path in model.parent.iterdir() if path != model]


def test_source_converts(source, tmp_path):
    out = convert_folder(source, tmp_path / "out")
    assert [result for result in verify(out) if not result.holds] == []


def test_same_seed_same_bytes(model, source, tmp_path):
    write_model(tmp_path / "model", CONFIG, SEED, quiet=True)
    write_source(tmp_path / "source", CONFIG, SEED, quiet=True)
    assert everything(tmp_path / "model") == everything(model)
    assert everything(tmp_path / "source") == everything(source)
    write_model(tmp_path / "other", CONFIG, SEED + 1, quiet=True)
    assert (tmp_path / "other" / "layers-00.safetensors").read_bytes() != (model / "layers-00.safetensors").read_bytes()


def test_model_holds_the_weights_of_the_source(model, source):
    ours = read_tensors(model)
    weights, originals = dequantised(ours), read_tensors(source)
    with Checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, load_recipe("e4m3"))
    for planned in plan.tensors:
        piece, spec = planned.piece, planned.stored.spec
        original = originals[piece.name].float()
        original = original if piece.index is None else original[piece.index]
        original = original if piece.rows is None else original[slice(*piece.rows)]
        error = (weights[spec.name] - original).norm() / original.norm()
        assert error < (0.04 if planned.stored.scale else 1e-9), spec.name  # E4M3 rounds by 2^-4 at most, 0.027 rms
    scales = ours["model.language_model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv"].float()
    assert scales.max() / scales.min() >= 8


def test_blocks_differ_and_ends_are_unlikely(source):
    weights = read_tensors(source)
    blocks = weights["model.language_model.layers.0.mlp.experts.down_proj"].float().reshape(8, 2, 128, 1, 128)
    sizes = blocks.square().mean(dim=(2, 4)).sqrt()
    assert sizes.max() / sizes.min() > 4
    assert (weights["lm_head.weight"][[256, 258]] == 0).all()
    assert (weights["lm_head.weight"][257] != 0).any()


def test_draws_do_not_depend_on_the_slices():
    random = RandomWeights(fused(CONFIG), SEED)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    whole = random.bfloat16(name, 0, 8 * 256 * 256)
    assert np.isfinite(whole.view(e4m3.BFLOAT16).astype(np.float32)).all()
    assert (random.bfloat16(name, 1001, 70_003) == whole[1001:70_003]).all()
    assert (RandomWeights(fused(model_config(4, 512, SIZES)), SEED).bfloat16(name, 0, 99) == whole[:99]).all()


def test_sparse_source(source, tmp_path):
    folder = tmp_path / "sparse"
    sparse.make(folder, CONFIG, SEED)
    first, empty = fingerprint(folder), held(folder)
    sparse.fill(folder, range(1, 3), SEED)
    layer = sum(2 * weight.count for weight in fused(CONFIG) if weight.layer == 1)
    assert fingerprint(folder) == first
    assert held(folder) > empty + 1.5 * layer
    sparse.punch(folder, range(1, 3))
    assert fingerprint(folder) == first
    assert held(folder) < empty + 0.2 * layer
    sparse.fill(folder, range(3), SEED)
    sparse.fill(folder, sparse.OUTSIDE, SEED)
    assert fingerprint(folder) == first
    with Checkpoint(folder) as ours, Checkpoint(source) as theirs:
        for name, info in theirs.tensors.items():
            piece = Piece(name, info.shape)
            assert ours.read(piece).view(np.uint8).tobytes() == theirs.read(piece).view(np.uint8).tobytes(), name


def test_sparse_samples_stay_whatever_the_seed(tmp_path):
    sparse.make(tmp_path, CONFIG, SEED)
    before = fingerprint(tmp_path)
    sparse.fill(tmp_path, range(3), SEED + 1)
    assert fingerprint(tmp_path) == before
    with pytest.raises(InputError, match="no such layers"):
        sparse.punch(tmp_path, range(2, 4))


def test_gguf(source, tmp_path):
    gguf = pytest.importorskip("gguf")
    from bench.write_gguf import gguf_bytes, write_gguf

    file = tmp_path / "model.gguf"
    write_gguf(file, CONFIG, SEED, quiet=True)
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert gguf_bytes(CONFIG) == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert len(tensors) == 3 + 2 * 19 + 16
    known = set(gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN35MOE])
    patterns = {gguf.TENSOR_NAMES[tensor].format(bid=1) for tensor in known}
    assert {name.rsplit(".", 1)[0] for name in tensors if name.startswith("blk.1.")} - {"blk.1"} <= patterns
    assert tensors["blk.1.ffn_up_exps.weight"].shape.tolist() == [256, 128, 8]
    assert tensors["blk.0.ssm_conv1d.weight"].shape.tolist() == [4, 512]
    assert "blk.2.attn_q.weight" in tensors
    assert "blk.1.attn_q.weight" not in tensors
    recurrent = reader.fields["qwen35moe.attention.recurrent_layers"]
    assert recurrent.contents() == [True, True, False]

    def values(name: str) -> np.ndarray:
        tensor = tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    originals = {name: tensor.float().numpy() for name, tensor in read_tensors(source).items()}
    prefix = "model.language_model.layers.0."
    up = originals[prefix + "mlp.experts.gate_up_proj"][:, 128:]
    quantized = gguf.quants.quantize(up, gguf.GGMLQuantizationType.Q8_0)
    assert (tensors["blk.0.ffn_up_exps.weight"].data == quantized).all()
    tiled = [0, 2, 1, 3]  # value heads 0 and 1 belong to key head 0
    z = originals[prefix + "linear_attn.in_proj_z.weight"].reshape(4, 64, 256)[tiled].reshape(256, 256)
    assert np.allclose(values("blk.0.attn_gate.weight"), z, atol=np.abs(z).max() / 127)
    out = originals[prefix + "linear_attn.out_proj.weight"].reshape(256, 4, 64)[:, tiled].reshape(256, 256)
    assert np.allclose(values("blk.0.ssm_out.weight"), out, atol=np.abs(out).max() / 127)
    assert np.allclose(values("blk.0.ssm_a"), -np.exp(originals[prefix + "linear_attn.A_log"][tiled]))
    assert np.allclose(values("blk.0.attn_norm.weight"), 1 + originals[prefix + "input_layernorm.weight"])
    assert np.allclose(values("blk.0.ssm_norm.weight"), originals[prefix + "linear_attn.norm.weight"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{}/x", "--layers", "0"], "--layers is not usable"),
        (["{}/x", "--layers", "2", "--vocab", "500"], "--vocab is not usable"),
        (["{}/x", "--layers", "1", "--source"], "not enough room"),
        (["{}/x", "--layers", "1"], "not enough room"),
        (["--layers", "2", "--gguf", "{}/x"], "not enough room"),
        (["--layers", "1", "--gguf", "{}/x"], "not usable with --gguf"),
        (["{}", "--layers", "2"], "OUT is not empty"),
        (["{}/file", "--layers", "2"], "OUT is a file"),
        (["{}/absent/x", "--layers", "2"], "its folder does not exist"),
        (["--layers", "2"], "nothing to write"),
        (["--layers", "2", "--gguf", "{}/file"], "the file is there already"),
        (["{}/x", "--layers", "2", "--source", "--gguf", "{}/g"], "exclude each other"),
    ],
)
def test_refusals(arguments, problem, tmp_path, monkeypatch):
    if "room" in problem:
        monkeypatch.setattr(checks, "free_space", lambda _: 800_000_000)
    (tmp_path / "file").write_text("")
    arguments = [argument.format(tmp_path) for argument in arguments]
    with pytest.raises(InputError, match=problem):
        CliRunner().invoke(make_model.app, arguments, catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["3", "2:1", "a:b", ":", "inside"])
def test_sparse_refusals(what, tmp_path):
    with pytest.raises(InputError, match="not layers"):
        CliRunner().invoke(sparse_source.app, ["fill", str(tmp_path), what], catch_exceptions=False)


def test_config_is_as_published(source):
    config = json.loads((source / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert config["text_config"]["rope_parameters"]["mrope_section"] == [11, 11, 10]
