"""Tiny checkpoints made faulty or odd, and what must follow: a refusal that names everything, or a sound result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.quantize import NonFinite
from mosaic.convert.recipe import load_recipe
from mosaic.convert.verify import verify
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint
from support.fp8 import dequantise, quantise, read_checkpoint, unfuse
from support.shards import INDEX, write_shards

MOSAIC_CONVERT = Path(sys.executable).with_name("mosaic-convert")

TEXT = "model.language_model."
NORM = f"{TEXT}layers.0.input_layernorm.weight"
QUERY = f"{TEXT}layers.1.self_attn.q_proj.weight"
KEY = f"{TEXT}layers.1.self_attn.k_proj.weight"
FUSED = f"{TEXT}layers.0.mlp.experts.gate_up_proj"
EXPERT = f"{TEXT}layers.0.mlp.experts.2.up_proj.weight"
EMBEDDING = f"{TEXT}embed_tokens.weight"
HEAD = "lm_head.weight"
VISION = "model.visual.blocks.1.attn.qkv.weight"
MTP = "mtp.layers.0.self_attn.k_proj.weight"


# ----------------------------------------------------------------------------------------- changing a checkpoint


def edit(folder, change):
    """Rewrite the weights after `change` of {name: tensor}; each tensor stays in its file, new ones go to the last."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    last = sorted(set(weight_map.values()))[-1]
    tensors = read_checkpoint(folder)
    changed = change(tensors)
    files = {}
    for name, tensor in (changed if isinstance(changed, dict) else tensors).items():
        files.setdefault(weight_map.get(name, last), {})[name] = tensor.clone()
    for file in set(weight_map.values()):
        (folder / file).unlink()
    write_shards(folder, files)


def edit_config(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def edit_index(folder, change):
    file = folder / INDEX
    value = json.loads(file.read_text())
    change(value["weight_map"])
    file.write_text(json.dumps(value))


def file_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def set_element(folder, name, position, value):
    def change(tensors):
        tensors[name].view(torch.uint8 if tensors[name].dtype == torch.float8_e4m3fn else tensors[name].dtype)[
            position
        ] = value

    edit(folder, change)


# ---------------------------------------------------------------------------------------------- what must follow


def run(folder, out, recipe="e4m3", nonfinite=NonFinite.REFUSE, overwrite=False):
    """What mosaic-convert does, and the plan."""
    with Checkpoint(folder) as source:
        plan = make_plan(source, load_recipe(recipe), nonfinite)
        written = convert(plan, out, workers=1, overwrite=overwrite, quiet=True)
    return written, plan


def refused(folder, *facts, recipe="e4m3", out=None):
    """The refusal of a checkpoint: nothing written, everything named."""
    out = out or folder.parent / "out"
    with pytest.raises(InputError) as refusal:
        run(folder, out, recipe)
    assert not out.exists()
    names_everything(refusal.value, *facts)
    return refusal.value


def names_everything(error, *facts):
    assert {"file", "found", "expected", "remedy"} <= error.facts.keys()
    for fact in facts:
        assert fact in str(error)


def refused_while_reading(folder, *facts, recipe="e4m3"):
    """The refusal of weights: no catalog, and the directory is known as unfinished."""
    out = folder.parent / "out"
    with pytest.raises(InputError) as refusal:
        run(folder, out, recipe)
    assert not (out / "mosaic.json").exists()
    assert not list(out.glob(".mosaic-convert/*.partial"))
    names_everything(refusal.value, *facts)
    assert {"tensor", "expected"} <= refusal.value.facts.keys()
    with pytest.raises(InputError, match="unfinished"):
        verify(out)
    return refusal.value


def strict_json(file):
    """As browsers and other languages read it: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{file}: {constant} is no JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def converts(folder, recipe="e4m3", nonfinite=NonFinite.REFUSE):
    """{name: tensor} of the result, whose every invariant holds; and its report."""
    out = folder.parent / "out"
    written, _ = run(folder, out, recipe, nonfinite)
    assert written
    assert {result.invariant: result.failures for result in verify(out) if not result.holds} == {}
    for file in ("config.json", "mosaic.json", "report.json", INDEX):
        strict_json(out / file)
    return read_checkpoint(out), strict_json(out / "report.json")


def means_the_source(source, result):
    """Kept tensors are byte-identical; quantised ones within 16 scales, and no scale twice as large as it need be."""
    for name, tensor in unfuse(source).items():
        stored = result.pop(name)
        if stored.dtype != torch.float8_e4m3fn:
            assert stored.dtype == tensor.dtype, name
            assert torch.equal(stored.view(torch.uint8), tensor.view(torch.uint8)), name
            continue
        scale = result.pop(f"{name}_scale_inv").float()
        bound = 16 * dequantise(torch.ones_like(stored), scale)
        assert ((dequantise(stored, scale) - tensor.float()).abs() <= bound).all(), name
        expected = quantise(tensor.float(), torch.float32)[1]
        assert (scale >= expected * (1 - 2**-20)).all(), name
        assert (scale <= expected * (1 + 2**-6)).all(), name
    assert not result


def same_shards(out, reference):
    """The shards are those of the reference conversion, byte for byte."""
    names = sorted(file.name for file in reference.glob("*.safetensors"))
    assert names == sorted(file.name for file in out.glob("*.safetensors"))
    for name in names:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name


def assert_same_tensors(result, expected):
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype, name
        assert result[name].shape == tensor.shape, name
        assert torch.equal(result[name].view(torch.uint8), tensor.view(torch.uint8)), name


def snapshot(folder):
    return {
        file.relative_to(folder): (file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(folder.rglob("*"))
    }


def convert_program(*arguments):
    return subprocess.run([MOSAIC_CONVERT, *map(str, arguments), "--quiet"], capture_output=True, text=True, timeout=60)
