"""Models for devices that are none: random ones, and speeds of the machine that nobody has to measure."""

from pathlib import Path

import pytest

from mosaic.runtime import loading
from mosaic.runtime.speeds import Speeds
from support.fp8 import read_checkpoint, unfuse, write_official_fp8
from support.models import convert_folder
from support.shards import write_shards
from support.tiny import Tiny, write_checkpoint, write_tokenizer

SIZES = {"interval": 2, "layers": 4, "mtp": False, "visual": False, "shards": 1}
MODELS = {
    "3.6": Tiny(**SIZES),
    "next": Tiny(**SIZES | {"visual": True}, family="qwen3_next"),
    "moe": Tiny(**SIZES | {"mtp": True, "visual": True}, family="qwen3_moe", mlp_only_layers=(2,)),
    "small": Tiny(**SIZES | {"layers": 2}),
    "bf16": Tiny(**SIZES, moe_inter=72),  # experts that cannot be E4M3
}


@pytest.fixture(autouse=True)
def speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "speeds", lambda *arguments: Speeds(1e10, 1e9))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """Model directories by their names, made when they are first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            root = tmp_path_factory.mktemp(name.replace(".", "_"))
            write_checkpoint(MODELS.get(name, MODELS["3.6"]), root / "source")
            write_tokenizer(root / "source", MODELS.get(name, MODELS["3.6"]).vocab)
            made[name] = mixed(root) if name == "mixed" else convert_folder(root / "source", root / "model")
        return made[name]

    return folder


def mixed(root: Path) -> Path:
    """Experts of layer 1 in BF16, of layer 2 in E4M3 with float32 scales; of layers 0 and 3 with bfloat16 scales."""
    plain = unfuse(read_checkpoint(root / "source"))
    write_official_fp8(root / "source", root / "fp8")
    tensors = read_checkpoint(root / "fp8")
    for name in [name for name in tensors if ".experts." in name]:
        if ".layers.1." in name:
            kept = plain.get(name)
            tensors.pop(name) if kept is None else tensors.update({name: kept})
        elif ".layers.2." in name and name.endswith("_scale_inv"):
            tensors[name] = tensors[name].float()
    for file in (root / "fp8").glob("*.safetensors"):
        file.unlink()
    write_shards(root / "fp8", {"model.safetensors": tensors})
    (root / "keep.yaml").write_text("rules:\n  - treatment: keep\n")
    return convert_folder(root / "fp8", root / "model", str(root / "keep.yaml"))
