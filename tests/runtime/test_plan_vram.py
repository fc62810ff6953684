"""What lies on a device: exact to the byte where it stays there, never more than the budget, never less for more."""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from mosaic.format.errors import InputError
from mosaic.format.shard import read_header
from mosaic.format.spec import Mixer
from mosaic.runtime import vram_items
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.footprint import device_scratch_nbytes
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.plan_vram import PIECES, make_vram_plan
from mosaic.runtime.simulator.sizes import published
from mosaic.runtime.sizes import ARENA
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import VramWishes, Wishes
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint

MIB, GIB = 1 << 20, 1 << 30
PLENTY = 1 << 42
EXPERT = 3 * 128 * 256 + 3 * 2 * 2  # of the tiny model: gate, up, down; two BF16 scales each
CONTEXT = 1000


class Places(dict):
    """Iterates over keys as ExpertPlaces does."""

    top_k, num_experts = 8, 256


def large():
    """Qwen3.6-35B-A3B as mosaic-convert makes it, by its sizes."""
    sizes = published()
    dense = Counter({**dict(enumerate(sizes.dense)), None: sizes.head})
    place = SimpleNamespace(code_dtype="F8_E4M3", kind=("F8_E4M3", "BF16"), nbytes=sizes.expert)
    places = Places(dict.fromkeys(itertools.product(range(40), range(256)), place))
    return SimpleNamespace(spec=sizes.spec, dense_nbytes=lambda: dense), places


@pytest.fixture(scope="module")
def model(tiny):
    weights = Weights(tiny)
    return weights, ExpertPlaces(weights)


def plan(model, budget=PLENTY, context=CONTEXT, *, vram=None, layers=None, **wishes):
    return make_vram_plan(*model, Wishes(context=context, **wishes), VramWishes(vram, layers), budget)


def fits(model, budget, **wishes):
    try:
        return plan(model, budget, **wishes)
    except InputError:
        return None


def worth(found):
    """What comes first in the order of giving counts most."""
    arena = ARENA // (found.items["expert slots"] // found.slots) if found.slots else 0
    return found.piece, min(found.slots, arena), found.layers, found.head, found.slots


def threshold(model, above, **wishes):
    """The least budget for a plan of which `above` is true; it must stay so."""
    low, high = 0, PLENTY
    while high - low > 1:
        middle = (low + high) // 2
        found = fits(model, middle, **wishes)
        low, high = (low, middle) if found and above(found) else (middle, high)
    return high


# --- the items --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KVFormat)
@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("layers", [0, 1, 2, 3, 4])
def test_the_items_of_a_tiny_model(model, tiny, layers, parallel, kv):
    """Linear, full, linear, full; from the files' headers and the shapes of what will be allocated."""
    found = plan(model, vram=20 * EXPERT, layers=layers, parallel=parallel, kv=kv)
    stored = {name: info.nbytes for file in tiny.glob("*.safetensors") for name, info in read_header(file).items()}
    inside = [f".layers.{layer}." for layer in range(layers)]
    dense = {name for name in stored if ".experts." not in name and any(part in name for part in inside)}
    caches, states, items = layers // 2, layers - layers // 2, dict(found.items)
    width, scale = {KVFormat.F32: (4, 0), KVFormat.BF16: (2, 0), KVFormat.E4M3: (1, 4)}[kv]
    page = 2 * 64 * 2 * (64 * width + scale)
    assert items.pop("kernels, fragmentation, others") == vram_items.SLACK
    assert items.pop("expert slots") == 20 * EXPERT
    assert items.pop("streaming buffer") == (2 * 16 * EXPERT if layers else 0)
    assert items.pop("dense weights") == sum(stored[name] for name in dense)
    outside = sum(n for name, n in stored.items() if "lm_head" in name or name.endswith("language_model.norm.weight"))
    assert items.pop("head") == (outside if layers == 4 else 0)
    assert items.pop("keys and values") == caches * (parallel * 16 + parallel + 1) * page
    assert items.pop("page tables") == caches * parallel * 4 * (16 + 4)
    assert items.pop("recurrent states") == parallel * states * 4 * (8 * 32 * 32 + 3 * 512)
    logits = 4 * (vram_items.BLOCK_LOGITS + 512) if layers == 4 else 0
    assert items.pop("prompt in work") == logits + device_scratch_nbytes(
        model[0].spec, model[0].spec.layers[:layers], 1000
    )
    assert items.pop("graphs") == layers * vram_items.GRAPH
    assert not items
    assert (found.layers, found.head, found.slots, found.stream) == (layers, layers == 4, 20, 32)
    assert found.kind == ("F8_E4M3", "BF16")
    assert found.context == CONTEXT


def test_the_items_of_the_published_model():
    """By the shapes of docs/MODELS.md, all layers and the head."""
    found = plan(large(), context=8192)
    items, blocks = found.items, 16 * 4
    assert (found.layers, found.head, found.slots) == (40, True, 10240)
    assert items["expert slots"] == 10240 * (3 * 512 * 2048 + 3 * 2 * blocks)
    assert items["head"] == 248320 * 2048 * 2 + 2048 * 2
    assert items["keys and values"] == 10 * (8192 // 64 + 2) * 2 * 64 * 2 * 256 * 2
    assert items["page tables"] == 10 * 4 * (8192 // 64 + 4)
    assert items["recurrent states"] == 30 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert items["dense weights"] == sum(published().dense)
    assert items["streaming buffer"] == 2 * 16 * 3146112


def test_the_laptop():
    """7.2 GiB of 8: an arena of 3.2 GiB, every layer and the head, and some slots more."""
    found = plan(large(), int(7.2 * GIB), context=8192)
    assert (found.layers, found.head, found.piece) == (40, True, 2048)
    assert ARENA <= found.items["expert slots"] < ARENA * 1.25
    assert 0 <= found.budget - found.total < 3146112
    small = plan(large(), int(5.5 * GIB), context=8192)
    assert 20 < small.layers < 40
    assert not small.head
    tiny = plan(large(), 2 * GIB, context=8192)
    assert (tiny.layers, tiny.head, tiny.piece) == (0, False, 1024)
    assert tiny.slots > 400


def test_a_sequence_longer_than_a_page_has_another(model):
    """Rows of a table begin at multiples of 16 bytes: there is room for four numbers, or eight."""
    contexts = (64, 65, 4 * 64, 4 * 64 + 1)
    one, two, four, five = (plan(model, context=context, layers=2, vram=8 * EXPERT).items for context in contexts)
    assert two["keys and values"] - one["keys and values"] == 2 * 64 * 2 * 64 * 2
    assert one["page tables"] == two["page tables"] == four["page tables"] == five["page tables"] - 16


# --- the order of giving ----------------------------------------------------------------------------------------------


def test_each_comes_when_the_one_before_has_all_it_may(monkeypatch, model):
    """A byte less, and the last that came is not there. An arena of 20 slots."""
    monkeypatch.setattr("mosaic.runtime.plan_vram.ARENA", 20 * EXPERT)
    short = {"context": PIECES[-1]}  # which is one piece, however long they may be
    steps = [threshold(model, lambda found, count=count: found.layers >= count, **short) for count in (1, 2, 3, 4)]
    steps.append(threshold(model, lambda found: found.head, **short))
    assert steps == sorted(steps)
    for step in steps:
        without, found = plan(model, step - 1, **short), plan(model, step, **short)
        assert (without.layers, without.head) < (found.layers, found.head)
        assert without.slots >= found.slots == 20
        assert found.total == step
    more = plan(model, steps[-1] + 3 * EXPERT, **short)
    assert (more.slots, more.layers, more.head) == (23, 4, True)


def test_slots_are_two_layers_experts_of_a_token_or_none(model):
    first = threshold(model, lambda found: found.slots > 0, layers=0)
    assert plan(model, first, layers=0).slots == 8
    assert plan(model, first + EXPERT, layers=0).slots == 9
    assert fits(model, first - 1, layers=0) is None
    assert plan(model).slots == 64  # there are no more experts


@pytest.mark.parametrize("layers", [0, 3, 4, 99])
def test_layers_that_were_asked_for(model, layers):
    found = plan(model, layers=layers)
    assert found.layers == min(layers, 4)
    assert found.head == (layers >= 4)
    least = threshold(model, lambda found: True, layers=layers)
    assert plan(model, least, layers=layers).layers == min(layers, 4)


def test_slots_that_were_asked_for(model):
    assert plan(model, vram=10 * EXPERT + EXPERT - 1).slots == 10
    assert plan(model, vram=GIB).slots == 64
    none = plan(model, vram=0)
    assert (none.slots, none.layers, none.head) == (0, 4, True)


def test_what_was_asked_for_comes_before_what_was_not(model):
    """All layers, in a budget in which slots of the default size would leave no room for them."""
    least = threshold(model, lambda found: True, layers=4)
    found = plan(model, least + 9 * EXPERT, layers=4)
    assert (found.layers, found.slots) == (4, 9)
    assert plan(model, least + 9 * EXPERT).layers < 4


def test_pieces_are_shorter_where_they_would_take_too_much(model):
    scratch = {piece: device_scratch_nbytes(large()[0].spec, large()[0].spec.layers, piece) for piece in PIECES}
    for longer, shorter in itertools.pairwise(PIECES):
        assert plan(large(), max(8 * scratch[longer], GIB), context=4096).piece == longer
        assert plan(large(), 8 * scratch[longer] - 1, context=4096, vram=0).piece == shorter
    assert plan(large(), 8 * scratch[1024] - 1, context=1024, vram=0).piece == 512


def test_pieces_are_shorter_where_more_was_asked_for():
    least = threshold(large(), lambda found: True, context=4096, layers=40, vram=ARENA)
    assert [
        plan(large(), least + extra * MIB, context=4096, layers=40, vram=ARENA).piece for extra in (0, 100, 500)
    ] == [
        256,
        512,
        2048,
    ]


# --- any budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tiny", "published"])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_within_its_budget_and_more_never_places_less(model, which, seed):
    drawn = random.Random(seed)
    subject, most = (model, 700 * MIB) if which == "tiny" else (large(), 14 * GIB)
    wishes = {
        "context": drawn.choice((100, 2048, 4096)),
        "parallel": drawn.choice((1, 2, 8)),
        "layers": drawn.choice((None, None, 0, 2)),
        "vram": drawn.choice((None, None, subject[1][0, 0].nbytes * 16)),
    }
    budgets = sorted(drawn.randrange(most) for _ in range(60))
    found = [fits(subject, budget, **wishes) for budget in budgets]
    there = [one for one in found if one]
    assert found == [None] * (len(found) - len(there)) + there  # once something fits, something always does
    assert len(there) > 10
    assert all(one.total <= one.budget == budget for one, budget in zip(found, budgets, strict=True) if one)
    assert all(worth(one) <= worth(other) for one, other in itertools.pairwise(there))
    assert worth(there[0]) < worth(there[-1])


# --- other experts ----------------------------------------------------------------------------------------------------


def other(tmp_path, **changes):
    write_checkpoint(Tiny(mtp=False, visual=False, **changes), tmp_path / "source")
    weights = Weights(convert_folder(tmp_path / "source", tmp_path / "out"))
    return weights, ExpertPlaces(weights)


def test_experts_of_the_most_frequent_kind_count():
    weights, places = large()
    wide = SimpleNamespace(code_dtype="F8_E4M3", kind=("F8_E4M3", "F32"), nbytes=3146496)
    plain = SimpleNamespace(code_dtype="BF16", kind=("BF16", "-"), nbytes=6 << 20)
    for key in places:
        if key[0] < 21:
            places[key] = plain if key[0] < 11 else wide
    found = plan((weights, places), context=4096)
    assert (found.kind, found.slots) == (("F8_E4M3", "BF16"), 19 * 256)
    for key in places:
        if key[0] >= 30:
            places[key] = plain
    found = plan((weights, places), context=4096)
    assert (found.kind, found.slots) == (("F8_E4M3", "F32"), 10 * 256)
    assert found.items["expert slots"] == found.slots * 3146496


def test_experts_that_are_not_e4m3_have_no_slots():
    weights, places = large()
    plain = SimpleNamespace(code_dtype="BF16", kind=("BF16", "-"), nbytes=6 << 20)
    found = plan((weights, Places(dict.fromkeys(places, plain))), context=4096)
    assert (found.slots, found.stream, found.kind, found.layers, found.head) == (0, 0, None, 40, True)
    assert found.items["streaming buffer"] == found.items["expert slots"] == 0
    with pytest.raises(InputError, match="E4M3"):
        plan((weights, Places(dict.fromkeys(places, plain))), context=4096, vram=GIB)
    with pytest.raises(InputError, match="no expert slots and no layers"):
        plan((weights, Places(dict.fromkeys(places, plain))), context=4096, layers=0)


def test_a_model_without_experts(tmp_path):
    dense = other(tmp_path, family="qwen3_moe", mlp_only_layers=(0, 1, 2, 3))
    found = plan(dense)
    assert (found.slots, found.stream, found.layers, found.head) == (0, 0, 4, True)
    assert all(layer.mixer is Mixer.FULL_ATTENTION for layer in dense[0].spec.layers)
    assert found.items["recurrent states"] == 0


def test_a_tied_head_is_a_copy_of_the_embedding(tmp_path):
    found = plan(other(tmp_path, tie=True))
    assert found.items["head"] == 512 * 256 * 2 + 256 * 2


def test_few_experts_have_a_small_streaming_buffer(tmp_path):
    found = plan(other(tmp_path, experts=6, top_k=2))
    assert found.stream == 12
    assert found.items["streaming buffer"] == 12 * EXPERT


# --- refusals ---------------------------------------------------------------------------------------------------------


def needed(refusal):
    """The bytes that a refusal names."""
    return int(refusal.value.facts["expected"].split("at least ")[1].split(" bytes")[0].replace(",", ""))


@pytest.mark.parametrize(
    "wishes", [{"layers": 3}, {"vram": 30 * EXPERT}, {"vram": 8 * EXPERT, "layers": 4}, {}, {"layers": 0}, {"vram": 0}]
)
def test_refusals_name_what_is_needed(model, wishes):
    """To the byte."""
    with pytest.raises(InputError, match="--device cpu") as refusal:
        plan(model, 200 * MIB, **wishes)
    assert "209,715,200 bytes (200.00 MiB)" in str(refusal.value)
    least = needed(refusal)
    found = plan(model, least, **wishes)
    assert found.total == least
    with pytest.raises(InputError):
        plan(model, least - 1, **wishes)


def test_refusals_say_what_takes_it(model):
    with pytest.raises(InputError, match="what was asked for") as refusal:
        plan(model, MIB, vram=20 * EXPERT, layers=3)
    dense = sum(model[0].dense_nbytes()[layer] for layer in range(3))
    assert f"20 expert slots take {20 * EXPERT:,} bytes" in str(refusal.value)
    assert f"3 layers {dense:,} bytes" in str(refusal.value)


def test_slots_too_few_to_be_of_use_are_refused(model):
    with pytest.raises(InputError, match="--vram is of no use") as refusal:
        plan(model, vram=8 * EXPERT - 1)
    assert needed(refusal) == 8 * EXPERT
    assert plan(model, vram=8 * EXPERT).slots == 8


def test_nothing_asked_for_is_refused(model):
    with pytest.raises(InputError, match="no expert slots and no layers"):
        plan(model, vram=0, layers=0)
