"""RAM and a device's memory planned together: what lies on the device is not in RAM, and the context is one."""

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime import plan as plan_module
from mosaic.runtime import ram_items
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.promotion import RING
from mosaic.runtime.footprint import kv_nbytes
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.plan import SHORTEST, MemoryPlan, make_plan
from mosaic.runtime.plan_text import Expectation, plan_dict, plan_lines
from mosaic.runtime.plan_vram import VramPlan
from mosaic.runtime.plans import make_plans
from mosaic.runtime.speeds import Speeds
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import VramWishes, Wishes
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint

MIB = 1 << 20
PLENTY = 1 << 40
EXPERT = 3 * 128 * 256 + 3 * 2 * 2


@pytest.fixture(autouse=True)
def same_size(monkeypatch):
    """A process that is always as large."""
    for module in (plan_module, ram_items):
        monkeypatch.setattr(module, "resident_memory", lambda: 200 * MIB)


@pytest.fixture(scope="module")
def model(tiny):
    weights = Weights(tiny)
    return weights, ExpertPlaces(weights)


def both(model, *, layers=None, vram=None, vram_budget=PLENTY, context=256, budget=PLENTY, **wishes):
    wishes = Wishes(context=context, budget=budget, **wishes)
    return make_plans(*model, wishes, VramWishes(vram, layers), vram_budget)


def values(plan):
    """Of the items, the names without figures."""
    return {name.partition(" of ")[0]: nbytes for name, nbytes in plan.items.items()}


def test_without_a_device_it_is_the_plan_of_ram(model):
    wishes = Wishes(context=256, budget=PLENTY)
    assert make_plans(*model, wishes, VramWishes(), None) == (make_plan(*model, wishes), None)


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("layers", [0, 1, 2, 4])
def test_what_lies_on_the_device_is_not_in_ram(model, layers, parallel):
    here, there = both(model, layers=layers, parallel=parallel)
    before, after = values(make_plan(*model, Wishes(context=256, budget=PLENTY, parallel=parallel))), values(here)
    assert before["weights"] - after["weights"] == there.items["dense weights"] + there.items["head"]
    assert before["recurrent states"] - after["recurrent states"] == there.items["recurrent states"]
    tokens = (before["keys and values"] - after["keys and values"]) // (2 * 2 * 64 * 2)
    assert tokens == parallel * 256 * (layers // 2)
    assert after["states kept for later prompts"] == before["states kept for later prompts"] > 0
    handed = 4 * 256 * (2 * 256 + parallel * 5)
    moving = there.items["recurrent states"] // parallel
    assert after["staging for the device"] == RING * EXPERT + handed + moving
    assert "staging for the device" not in before
    assert here.context == there.context == 256


def test_dense_weights_leave_ram_beside_slots(model):
    budget = both(model, layers=4)[0].total - 20 * EXPERT
    here, there = both(model, layers=4, budget=budget)
    assert here.slots is not None
    assert here.items["dense weights"] == 0
    assert there.head
    some = both(model, layers=3, budget=budget)[0]
    wanted = sum(model[0].dense_nbytes()[layer] for layer in (3, None))
    assert wanted <= some.items["dense weights"] < wanted + 64 * 40


def test_ram_that_did_not_suffice_does_with_a_device(model):
    """The dense weights make the difference."""
    wishes = {"kept": 0, "context": 64}
    least = both(model, layers=4, budget=PLENTY, **wishes)[0]
    budget = least.total - 40 * EXPERT
    assert both(model, layers=4, budget=budget, **wishes)[0].slots > 8
    with pytest.raises(InputError, match="memory does not suffice"):
        both(model, layers=0, budget=budget - 60 * EXPERT, **wishes)


def test_a_tied_head_leaves_ram_but_for_rows_that_are_looked_up(tmp_path):
    write_checkpoint(Tiny(mtp=False, visual=False, tie=True), tmp_path / "source")
    weights = Weights(convert_folder(tmp_path / "source", tmp_path / "out"))
    here, there = both((weights, ExpertPlaces(weights)))
    assert there.head
    assert here.items["weights"] == weights.nbytes - there.items["dense weights"] - there.items["head"]


def test_pieces_of_the_device_are_those_of_ram(model):
    """A piece of a prompt goes through all layers."""
    here, there = both(model, layers=2, context=4096)
    assert there.piece == 2048
    alone = make_plan(*model, Wishes(context=4096, budget=PLENTY))
    assert here.items["prompt in work"] == 2 * alone.items["prompt in work"]


# --- one context ------------------------------------------------------------------------------------------------------


def token(model, layers):
    spec = model[0].spec
    return kv_nbytes(spec, layers, KVFormat.BF16)


def test_the_context_is_the_models_where_there_is_plenty(model):
    here, there = both(model, context=None)
    assert here.context == there.context == 4096


def test_what_the_device_affords(model, monkeypatch):
    monkeypatch.setattr("mosaic.runtime.plan.SHORTEST", 256)
    budget = 470 * MIB
    monkeypatch.setattr("mosaic.runtime.plan.KV_SHARE", budget // (1024 * token(model, model[0].spec.layers)))
    here, there = both(model, context=None, vram_budget=budget)
    assert here.context == there.context == 1024


def test_what_ram_affords_of_what_is_not_on_the_device(model, monkeypatch):
    monkeypatch.setattr("mosaic.runtime.plan.SHORTEST", 256)
    spec, budget = model[0].spec, 600 * MIB
    monkeypatch.setattr("mosaic.runtime.plan.KV_SHARE", budget // (1024 * token(model, spec.layers)))
    contexts = {layers: both(model, context=None, layers=layers, budget=budget)[0].context for layers in (0, 2, 4)}
    assert contexts == {0: 1024, 2: 2048, 4: 4096}
    for layers in contexts:
        here, there = both(model, context=None, layers=layers, budget=budget)
        assert here.context == there.context


@pytest.mark.parametrize("which", ["budget", "vram_budget"])
def test_the_shortest_where_more_does_not_fit(model, which):
    """The least RAM, or device memory, that does for it."""
    wishes = {"layers": 0 if which == "budget" else 4, "vram": 16 * EXPERT, "kept": 0}
    low, high = 0, PLENTY
    while high - low > 1:
        middle = (low + high) // 2
        try:
            both(model, context=SHORTEST, **wishes, **{which: middle})
            high = middle
        except InputError:
            low = middle
    with pytest.raises(InputError):
        both(model, context=4096, **wishes, **{which: high})
    here, there = both(model, context=None, **wishes, **{which: high})
    assert here.context == there.context == SHORTEST


def test_a_context_that_was_asked_for_is_kept(model):
    here, there = both(model, context=3000)
    assert here.context == there.context == 3000


@pytest.mark.parametrize(
    ("budgets", "problem"), [({"budget": MIB}, "memory does not"), ({"vram_budget": MIB}, "device")]
)
@pytest.mark.parametrize("context", [None, 512])
def test_either_can_be_too_little(model, budgets, problem, context):
    with pytest.raises(InputError, match=problem):
        both(model, context=context, **budgets)


def test_without_a_budget_ram_is_what_is_free(model, monkeypatch):
    monkeypatch.setattr(plan_module, "free_memory", lambda: 800 * MIB)
    assert both(model, budget=None)[0].budget == 900 * MIB
    assert both(model, budget=None, context=None)[0].budget == 900 * MIB


# --- as text ----------------------------------------------------------------------------------------------------------


def test_both_plans_as_text_and_as_json():
    here = MemoryPlan(5 << 30, 4096, 0, 77, 512, {"expert slots": 3 << 30})
    items = {"expert slots": 2 << 30, "dense weights": 1 << 30}
    there = VramPlan(6 << 30, 4096, 123, 17, True, 32, 1024, ("F8_E4M3", "BF16"), items)
    expected, measured = {"uniform routing": Expectation(0.25, 12.34)}, Speeds(30e9, 2e9)
    lines = plan_lines(here, expected, measured, there)
    alone = plan_lines(here, expected, measured)
    assert lines[: len(alone)] == alone
    text = "\n".join(lines[len(alone) :])
    for part in ("2.00 GiB", "3.00 GiB", "6.00 GiB", "slots: 123", "layers: 17, with the head", "1,024 tokens"):
        assert part in text, part
    assert plan_dict(here, expected, measured)["vram"] is None
    assert plan_dict(here, expected, measured, there)["vram"] == {
        "items": items,
        "total_bytes": 3 << 30,
        "budget_bytes": 6 << 30,
        "expert_slots": 123,
        "stream_slots": 32,
        "layers": 17,
        "head": True,
        "piece": 1024,
    }
