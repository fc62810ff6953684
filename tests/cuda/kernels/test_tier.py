"""The tier of experts over these kernels: hot ones, cold ones, copies that begin and land, prompts streamed past."""

import numpy as np
import pytest

from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.device.part import Tuning
from mosaic.runtime.engine import Engine
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.loading import LoadOptions
from mosaic.runtime.ops.cuda.find import find_gpu
from mosaic.runtime.ops.cuda.ops import CudaOps
from mosaic.runtime.weights import Weights
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint
from support.tiny_tokenizer import write_tokenizer

SIZES = {"hidden": 128, "vocab": 272, "heads": 2, "kv_heads": 1, "head_dim": 32, "linear_key_heads": 1}
SIZES |= {"linear_value_heads": 2, "linear_key_dim": 16, "linear_value_dim": 16, "experts": 8, "top_k": 2}
MODEL = Tiny(layers=2, interval=2, mtp=False, visual=False, shards=1, **SIZES)
IDS = np.random.default_rng(3).integers(0, 256, 20).tolist()
FLOAT32 = 1e-4  # of log-probabilities: logits are off by 2e-5 at most (test_model), and keys are stored in bfloat16


class InterpretedDevice(HostDevice):
    """The kernels, on memory of the host."""

    def __init__(self) -> None:
        super().__init__(room=1 << 30)
        self.ops = CudaOps()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tier")
    write_checkpoint(MODEL, root / "source")
    write_tokenizer(root / "source", MODEL.vocab)
    return convert_folder(root / "source", root / "out")


def scores(engine, count=12):
    """Of each token that the model chooses after a prompt."""
    answer = engine.generate(IDS, max_tokens=count, temperature=0, logprobs=0)
    return [chosen.token for chosen in answer.tokens], [chosen.logprob for chosen in answer.tokens], answer.stats


@pytest.mark.parametrize(("slots", "layers", "stream"), [(4, 1, 512), (16, 2, 16), (6, 0, 512)])
def test_tokens_are_those_of_the_cpu(folder, device, slots, layers, stream):
    """At few slots and many, with layers there and here, prompts streamed or not."""
    there = InterpretedDevice() if device.type == "cpu" else find_gpu(None)
    plain = Engine.load(folder, context=128, kv="f32", device="cpu")
    places = ExpertPlaces(Weights(folder))
    nbytes = places[0, 0].nbytes
    tiered = Engine.load(
        folder, context=128, kv="f32", device=there, vram=slots * nbytes, gpu_layers=layers,
        options=LoadOptions(tuning=Tuning(stream_tokens=stream)),
    )  # fmt: skip
    (expected, wanted, _), (found, logprobs, stats) = scores(plain), scores(tiered)
    assert found == expected
    assert np.abs(np.array(logprobs) - np.array(wanted)).max() < FLOAT32
    assert (stats.traffic.device_hits > 0) == (slots > 0)
    assert (stats.traffic.device_bytes > 0) == (slots > 0 or stream < len(IDS))
