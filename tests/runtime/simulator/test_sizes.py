"""Bytes of a model: those of its files, of the published release, and of what the runtime keeps."""

from collections import Counter

from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.format.shard import read_header
from mosaic.format.source import Checkpoint
from mosaic.format.spec import Mixer
from mosaic.format.tensors import Part, Role
from mosaic.runtime.bench_simulate import sizes_in
from mosaic.runtime.kv import KVFormat, KVPool
from mosaic.runtime.simulator.sizes import published
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import Weights
from support.listing import load_listing, write_sparse_checkpoint


def test_a_model_directory(tiny):
    sizes = sizes_in(tiny)
    tensors = {name: info.nbytes for file in tiny.glob("*.safetensors") for name, info in read_header(file).items()}
    decoder = sum(nbytes for name, nbytes in tensors.items() if ".layers." in name)
    outside = sum(nbytes for name, nbytes in tensors.items() if ".layers." not in name and "embed" not in name)
    assert sum(sizes.dense) + sizes.num_experts * sizes.expert == decoder
    assert sizes.head == outside
    assert sizes.spec == Weights(tiny).spec
    assert sizes.expert_layers == (0, 1, 2, 3)
    linear, full = sizes.dense[:2]
    assert linear != full
    assert sizes.dense == (linear, full, linear, full)


def test_the_published_model(tmp_path):
    """What mosaic-convert makes of the release: the bytes that its plan has for each layer."""
    config, files, total = load_listing()
    write_sparse_checkpoint(tmp_path, config, files, total)
    with Checkpoint(tmp_path) as checkpoint:
        plan = make_plan(checkpoint, load_recipe("e4m3"))
    sizes = published()
    assert sizes.spec == plan.spec
    entries = {entry.name: entry.nbytes for shard in plan.shards for entry in shard.layout.entries}
    nbytes = Counter()
    for planned in plan.tensors:
        spec = planned.stored.spec
        place = spec.layer if spec.part is Part.DECODER else spec.part
        kind = spec.role if spec.role in (Role.ROUTED_EXPERTS, Role.EMBEDDING) else "dense"
        nbytes[kind, place] += entries[spec.name] + entries.get(spec.scale_name, 0)
    assert sizes.dense == tuple(nbytes["dense", layer] for layer in range(40))
    assert sizes.head == nbytes["dense", Part.OUTSIDE]
    assert {sizes.expert * 256} == {nbytes[Role.ROUTED_EXPERTS, layer] for layer in range(40)}


def test_what_is_remembered_is_what_the_runtime_keeps(tiny):
    sizes = sizes_in(tiny)
    assert sizes.context == sizes.spec.max_position_embeddings < published().context == 8192
    attention, delta = sizes.spec.attention, sizes.spec.gated_delta
    pool = KVPool(attention.num_kv_heads, attention.head_dim, KVFormat.BF16)
    for number, layer in enumerate(sizes.spec.layers):
        if layer.mixer is Mixer.FULL_ATTENTION:
            assert sizes.remembered(number) == sizes.passed(number) == sizes.context * pool.token_nbytes
        else:
            assert sizes.remembered(number) == DeltaState(delta).nbytes
            assert sizes.passed(number) == 2 * DeltaState(delta).nbytes
