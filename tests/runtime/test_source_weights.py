"""A checkpoint as it was downloaded, as weights: every value is that of the safetensors library, fused or not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mosaic.format import architectures
from mosaic.format.errors import InputError
from mosaic.format.tensors import Part
from mosaic.runtime.source_weights import SourceWeights
from mosaic.runtime.weights import E4M3Matrix, ModelWeights
from support.fp8 import BLOCK, quantise, read_checkpoint, unfuse, write_official_fp8
from support.models import dequantised, same_bytes
from support.shards import INDEX
from support.tiny import Tiny, write_checkpoint

TEXT = "model.language_model."
ROUTER = f"{TEXT}layers.0.mlp.gate.weight"
EMBEDDING = f"{TEXT}embed_tokens.weight"
SMALL = {"layers": 2, "interval": 2, "experts": 4, "top_k": 2}
MODELS = {
    "fused": Tiny(**SMALL),
    "per-expert": Tiny(**SMALL, experts_layout="per_expert"),
    "tied": Tiny(**SMALL, tie=True),
    "next": Tiny(**SMALL, family="qwen3_next"),
    "moe": Tiny(**SMALL, family="qwen3_moe", mlp_only_layers=(1,)),
    "float16": Tiny(**SMALL, dtype="float16"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(MODELS[request.param], folder)
    return folder, unfuse(read_checkpoint(folder))


def everything(folder):
    """(spec, weight) of all that a model asks for, experts among it."""
    weights: ModelWeights = SourceWeights(folder)
    config = json.loads((folder / "config.json").read_text())
    names = json.loads((folder / INDEX).read_text())["weight_map"] if (folder / INDEX).exists() else [TEXT]
    for spec in architectures.find(config, folder).tensors(weights.spec, config, names):
        if spec.expert is None:
            yield spec, weights.matrix(spec.key)
        elif spec.part is Part.DECODER:
            yield spec, getattr(weights.expert(spec.layer, spec.expert), spec.key.rpartition(".")[2])


def test_every_tensor_is_that_of_the_library(model):
    folder, tensors = model
    count = 0
    for spec, weight in everything(folder):
        assert same_bytes(weight, tensors[spec.name]), spec.name
        count += 1
    assert count == sum(".experts." not in name or not name.startswith("mtp.") for name in tensors)
    names = {torch.bfloat16: "BF16", torch.float16: "F16"}
    assert set(SourceWeights(folder).dtypes) == {names[tensor.dtype] for tensor in tensors.values()}


def test_experts_of_a_stack_are_no_copies(tmp_path):
    write_checkpoint(MODELS["fused"], tmp_path)
    weights = SourceWeights(tmp_path)
    one, two = weights.expert(1, 2), weights.expert(1, 3)
    assert one is weights.expert(1, 2)
    assert one.up.data_ptr() - one.gate.data_ptr() == one.gate.nbytes
    assert two.gate.data_ptr() - one.gate.data_ptr() == 2 * one.gate.nbytes
    before = one.down.clone()
    weights.release("layers.1.")
    assert torch.equal(weights.expert(1, 2).down, before)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32, torch.float16])
def test_official_fp8_as_it_is(tmp_path, scales):
    write_checkpoint(MODELS["fused"], tmp_path / "source")
    write_official_fp8(tmp_path / "source", tmp_path / "fp8", scales)
    tensors, count = read_checkpoint(tmp_path / "fp8"), 0
    for spec, weight in everything(tmp_path / "fp8"):
        scale = tensors.get(spec.scale_name)
        assert isinstance(weight, E4M3Matrix) == (scale is not None), spec.name
        if scale is not None:
            assert torch.equal(weight.codes, tensors[spec.name].view(torch.uint8))
            assert same_bytes(weight.scales, scale.float() if scales is torch.float16 else scale)
            count += 1
    assert count > 20


def rewrite(folder, change):
    """One safetensors file, by the library, of all tensors as `change` leaves them."""
    tensors = read_checkpoint(folder)
    change(tensors)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_fp8_where_engines_read_no_fp8(tmp_path):
    """A tensor that operations take only as floats is dequantised."""
    write_checkpoint(MODELS["fused"], tmp_path / "source")
    write_official_fp8(tmp_path / "source", tmp_path / "fp8")

    def change(tensors):
        tensors[EMBEDDING], tensors[f"{EMBEDDING}_scale_inv"] = quantise(tensors[EMBEDDING])

    tensors = rewrite(tmp_path / "fp8", change)
    assert torch.equal(SourceWeights(tmp_path / "fp8").tensor("embedding"), dequantised(tensors)[EMBEDDING])


def test_fused_fp8_experts_find_their_scales(tmp_path):
    write_checkpoint(MODELS["fused"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    single = unfuse(read_checkpoint(tmp_path))

    def change(tensors):
        for name in [name for name in tensors if name.startswith(TEXT) and ".experts." in name]:
            parts = zip(*map(quantise, tensors[name]), strict=True)
            tensors[name], tensors[f"{name}_scale_inv"] = map(torch.stack, parts)

    rewrite(tmp_path, change)
    weights = SourceWeights(tmp_path)
    for expert in range(4):
        for kind in ("gate", "up", "down"):
            found = getattr(weights.expert(1, expert), kind)
            codes, scales = quantise(single[f"{TEXT}layers.1.mlp.experts.{expert}.{kind}_proj.weight"])
            assert torch.equal(found.codes, codes.view(torch.uint8))
            assert same_bytes(found.scales, scales)


def test_a_file_whose_data_begins_anywhere(tmp_path):
    write_checkpoint(MODELS["fused"], tmp_path)
    tensors = unfuse(rewrite(tmp_path, lambda tensors: None))
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    for spec, weight in everything(tmp_path):
        assert weight.data_ptr() % weight.element_size() == 0
        assert same_bytes(weight, tensors[spec.name]), spec.name


def edited(change):
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def without_a_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop(ROUTER)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        (shutil.rmtree, "no such checkpoint directory"),
        (lambda folder: (folder / "config.json").unlink(), "not a checkpoint directory"),
        (without_a_tensor, ROUTER),
        (edited(lambda config: config.update(model_type="llama")), "not supported"),
        (edited(lambda config: config.update(quantization_config={"quant_method": "gptq"})), "gptq"),
        (edited(lambda config: config["text_config"].update(hidden_size=512)), "wrong shape"),
    ],
)
def test_checkpoints_that_are_refused(tmp_path, damage, shown):
    write_checkpoint(MODELS["fused"], tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises(InputError, match="(?s)" + shown.replace(".", r"\.")):
        SourceWeights(tmp_path / "source")
