"""Whatever the budget and the wishes, the same words: a model loaded in every way that there is."""

import json
import subprocess
import sys

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime import plan as plan_module
from mosaic.runtime import ram_items
from mosaic.runtime.engine import Engine
from mosaic.runtime.experts import profile
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.replay import replay
from mosaic.runtime.experts.trace import read_trace
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.ops.cpu import CpuOps, set_threads, threads
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.weights import Weights

GREEDY = Sampling(temperature=0.0)
CONTEXT = 512
MIB = 1 << 20


@pytest.fixture(autouse=True)
def same_size(monkeypatch):
    """As far as plans go, this process does not grow from test to test."""
    for module in (plan_module, ram_items):
        monkeypatch.setattr(module, "resident_memory", lambda: 200 * MIB)


def budget_for(folder, slots):
    """Bytes that give about so many slots."""
    least = Loading(folder, KVFormat.BF16, context=CONTEXT, state_budget=0).plan
    places = ExpertPlaces(Weights(folder))
    return least.total - (len(places) - slots) * places[0, 0].span_nbytes - MIB // 4


def answer(folder, prompt="Tell me about Ruth 1.", count=24, ram=None, **wishes):
    options = LoadOptions(**wishes)
    engine = Engine.load(folder, ops=CpuOps(), context=CONTEXT, ram=ram, state_budget=0, options=options)
    engine.scheduler.stop = frozenset()
    found = engine.generate(prompt, max_tokens=count, temperature=0.0)
    return [chosen.token for chosen in found.tokens], found.stats


@pytest.fixture(scope="module")
def expected(demo):
    return answer(demo)[0]


@pytest.mark.parametrize("slots", [20, 60, 100])
@pytest.mark.parametrize("wishes", [{}, {"prefetch": True}, {"check": True}], ids=str)
def test_the_same_tokens(demo, expected, slots, wishes):
    found, stats = answer(demo, ram=budget_for(demo, slots), **wishes)
    assert found == expected
    traffic = stats.traffic
    assert traffic.misses > 0
    assert traffic.disk_bytes >= traffic.misses * ExpertPlaces(Weights(demo))[0, 0].span_nbytes
    assert (traffic.foretold > 0) == bool(wishes.get("prefetch"))


@pytest.mark.parametrize("count", [1, 3])
def test_at_any_number_of_threads(demo, expected, count):
    before = threads()
    try:
        set_threads(count)
        assert answer(demo, ram=budget_for(demo, 40))[0] == expected
    finally:
        set_threads(before)


def test_which_store_a_budget_gives(demo):
    plan = Loading(demo, KVFormat.BF16, context=CONTEXT).plan
    whole = Loading(demo, KVFormat.BF16, context=CONTEXT, ram=plan.total + MIB)
    assert isinstance(whole.load(CpuOps(), LoadOptions()).experts, MappedExperts)
    part = Loading(demo, KVFormat.BF16, context=CONTEXT, ram=budget_for(demo, 40))
    assert isinstance(part.load(CpuOps(), LoadOptions()).experts, CachedExperts)
    with pytest.raises(InputError, match="memory does not suffice"):
        Loading(demo, KVFormat.BF16, context=CONTEXT, ram=100 * MIB).plan  # noqa: B018


@pytest.mark.parametrize("ram", [None, 50], ids=["mapped", "cached"])
def test_recorded_routing_is_what_was_computed_and_can_be_replayed(demo, expected, tmp_path, ram):
    file = tmp_path / "demo.trace"
    found, stats = answer(demo, ram=ram and budget_for(demo, ram), record=file)
    assert found == expected
    trace = read_trace(file)
    assert len(trace.experts) == stats.prompt_tokens + stats.decoded_tokens
    assert trace.header.layers == tuple(ExpertPlaces(Weights(demo)).layers)
    asked = trace.experts[stats.prompt_tokens :].size
    prompt = sum(len(np.unique(trace.experts[: stats.prompt_tokens, layer])) for layer in range(trace.experts.shape[1]))
    assert stats.traffic.hits + stats.traffic.misses == asked + prompt
    assert 0 < replay(trace, 40)["ours"].hit_rate < 1
    answer(demo, record=file)  # goes on where it ended
    assert len(read_trace(file).experts) == 2 * len(trace.experts)


def test_a_warm_start_has_what_the_profile_names(demo, expected, tmp_path):
    file = tmp_path / "demo.trace"
    answer(demo, record=file)
    made = profile.from_trace(read_trace(file))
    made.save(tmp_path / "demo.profile")
    ram = budget_for(demo, 100)
    cold, warm = (answer(demo, ram=ram, warm=each)[1] for each in (None, tmp_path / "demo.profile"))
    assert answer(demo, ram=ram, warm=tmp_path / "demo.profile")[0] == expected
    assert warm.traffic.misses < cold.traffic.misses / 2


def test_a_profile_of_another_model_is_refused_before_anything_is_read(demo, tmp_path):
    file = tmp_path / "other.profile"
    file.write_text(json.dumps({"mosaic_profile": 1, "layers": [0], "num_experts": 2, "uses": [[1, 1]]}))
    with pytest.raises(InputError, match="not a routing profile of this model"):
        answer(demo, warm=file)


def test_prefetch_reads_what_the_next_layer_chooses(demo):
    """On the trained demo the choice foretold a layer early is right for more than chance, a quarter."""
    _, stats = answer(demo, ram=budget_for(demo, 60), prefetch=True, count=60)
    assert stats.traffic.recall > 0.4
    assert stats.traffic.ahead_used > 0


def test_figures_of_an_answer(demo):
    figures = answer(demo, ram=budget_for(demo, 40))[1].as_dict()
    assert 0 < figures["expert_hit_rate"] < 1
    assert figures["expert_misses"] > 0
    assert figures["disk_bytes"] > 0
    assert figures["disk_gb_s"] > 0
    assert figures["stall_seconds"] >= 0
    assert figures["prefetch_recall"] is None
    assert figures["major_faults"] >= 0


def test_large_blocks_go_back_to_the_system(demo):
    """Freed in the middle of the heap they would stay with the process, a little more with every long prompt."""
    code = f"""
import numpy as np
from mosaic.runtime import Engine
from mosaic.runtime.machine import resident_memory
engine = Engine.load({str(demo)!r}, context=64)
np.ones(30 << 20, np.uint8)  # freed at once: by itself the library would take blocks of this size into its heap now
before = resident_memory()
large = [np.ones(8 << 20, np.uint8) for _ in range(10)]
small = np.ones(50_000, np.uint8)  # behind them
del large
assert resident_memory() - before < 1 << 20, resident_memory() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
