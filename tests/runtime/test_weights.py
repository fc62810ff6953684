"""A model directory that does not hold together is refused when it is opened, before it computes anything wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mosaic.format.errors import InputError
from mosaic.format.index import EXPERTS_FILE
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.weights import E4M3Matrix, Weights
from support.models import convert_folder, read_tensors, same_bytes
from support.tiny import Tiny, write_checkpoint

QUERY = "model.language_model.layers.3.self_attn.q_proj.weight"
NORM = "model.language_model.layers.3.self_attn.q_norm.weight"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    write_checkpoint(Tiny(mtp=False, visual=False), root / "source")
    return convert_folder(root / "source", root / "out")


@pytest.fixture
def model(converted, tmp_path):
    shutil.copytree(converted, tmp_path / "model")
    return tmp_path / "model"


def edit_catalog(model, change):
    catalog = json.loads((model / "mosaic.json").read_text())
    change(catalog)
    (model / "mosaic.json").write_text(json.dumps(catalog))


def edit_shard(model, change):
    """Rewrite the shard of layer 3 with the library; the catalog follows."""
    file = model / "layers-03.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    edit_catalog(model, lambda catalog: catalog["files"][file.name].update(nbytes=file.stat().st_size))


def test_views_are_the_stored_bytes(converted):
    weights, tensors = Weights(converted), read_tensors(converted)
    query = weights.matrix("layers.3.attention.query")
    assert isinstance(query, E4M3Matrix)
    assert np.array_equal(query.codes.numpy(), tensors[QUERY].view(torch.uint8).numpy())
    assert same_bytes(query.scales, tensors[f"{QUERY}_scale_inv"])
    assert same_bytes(weights.tensor("layers.3.attention.query_norm"), tensors[NORM])
    expert = MappedExperts(weights).expert(2, 5)
    for name in ("gate", "up", "down"):
        stored = tensors[f"model.language_model.layers.2.mlp.experts.5.{name}_proj.weight"]
        assert np.array_equal(getattr(expert, name).codes.numpy(), stored.view(torch.uint8).numpy())


def test_weights_are_mapped_and_not_copied(converted):
    """The whole model opened: resident anonymous memory does not grow by it."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":\t") for line in lines if ":\t" in line)
        return int(status["RssAnon"].split()[0])

    size = sum(file.stat().st_size for file in converted.glob("*.safetensors")) // 1024
    before = anonymous()
    weights = Weights(converted)
    touched = sum(int(weights.matrix(f"layers.{layer}.moe.router").float().abs().sum() > 0) for layer in range(4))
    assert touched == 4
    assert anonymous() - before < size / 2


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda t: t.pop(f"{QUERY}_scale_inv"), "scales"),
        (lambda t: t.update({f"{QUERY}_scale_inv": t[f"{QUERY}_scale_inv"][:1].clone()}), "scales"),
        (lambda t: t.update({f"{QUERY}_scale_inv": t[f"{QUERY}_scale_inv"].half()}), "scales"),
        (lambda t: t.update({f"{NORM}_scale_inv": torch.ones(1, 1)}), "scales"),
        (lambda t: t.pop(NORM), "no such tensor"),
        (lambda t: t.update({NORM: t[NORM][:-1].clone()}), "[64]"),
        (lambda t: t.update({NORM: t[NORM].to(torch.int16)}), "I16"),
        (lambda t: t.update({QUERY: t[QUERY].view(torch.uint8)}), "U8"),
    ],
)
def test_tensors_that_are_not_the_contract(model, change, shown):
    edit_shard(model, change)
    with pytest.raises(InputError) as refusal:
        Weights(model)
    assert shown in str(refusal.value)
    assert {"file", "tensor", "found", "expected", "remedy"} <= refusal.value.facts.keys()


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.5}, {"norm_offset": 0.0}, {"vocab_size": 511}])
def test_a_catalog_that_describes_another_model(model, change):
    edit_catalog(model, lambda catalog: catalog["spec"].update(change))
    with pytest.raises(InputError, match="config"):
        Weights(model)


def test_an_index_that_points_elsewhere(model):
    data = bytearray((model / EXPERTS_FILE).read_bytes())
    rows = np.load(model / EXPERTS_FILE)
    position = data.index(int(rows[3]["offset"]).to_bytes(8, "little"))
    data[position : position + 8] = int(rows[4]["offset"]).to_bytes(8, "little")
    (model / EXPERTS_FILE).write_bytes(data)
    with pytest.raises(InputError, match="expert index"):
        MappedExperts(Weights(model))


def test_a_missing_file(model):
    (model / "layers-02.safetensors").unlink()
    with pytest.raises(InputError, match=r"layers-02\.safetensors"):
        Weights(model)
