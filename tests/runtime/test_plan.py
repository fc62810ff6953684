"""What a run takes is planned: it fits the budget, uses it, and says what is missing."""

import itertools

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime import plan as plan_module
from mosaic.runtime import ram_items
from mosaic.runtime import speeds as speeds_module
from mosaic.runtime.cgroup import cgroup_room
from mosaic.runtime.experts.arena import slot_nbytes
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.plan import MemoryPlan, affordable_context, make_plan
from mosaic.runtime.plan_text import Expectation, expectations, plan_dict, plan_lines, skewed_hit_rate
from mosaic.runtime.sizes import format_size, parse_size
from mosaic.runtime.speeds import Speeds, speeds
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import Wishes
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tiny):
    weights = Weights(tiny)
    return weights, ExpertPlaces(weights)


@pytest.fixture
def base(monkeypatch):
    """A process that is always as large."""
    for module in (plan_module, ram_items):
        monkeypatch.setattr(module, "resident_memory", lambda: 200 * MIB)
    return 200 * MIB + ram_items.GROWTH


def plan(model, budget, context=256, kv=KVFormat.BF16):
    return make_plan(*model, Wishes(kv, context, kept=0, budget=budget))


def least_for_all(model):
    return plan(model, 1 << 40).total


def test_what_fits_is_mapped(model, base):
    found = plan(model, least_for_all(model))
    assert found.slots is None
    assert found.items["weights"] == model[0].nbytes
    assert found.total == sum(found.items.values()) == found.budget


def test_a_byte_less_and_there_are_slots(model, base):
    found = plan(model, least_for_all(model) - 1)
    assert found.slots is not None
    assert found.total <= found.budget


def test_the_budget_is_used(model, base):
    """To less than one more slot and what it adds to a prompt's work, of budgets that do not hold everything."""
    everything, slot = least_for_all(model), slot_nbytes(model[1])
    budgets = range(everything - 60 * slot, everything, slot // 3)
    found = [plan(model, budget) for budget in budgets]
    for one in found:
        assert one.slots is not None
        assert 0 <= one.budget - one.total < 4 * slot or one.slots == one.num_experts
    assert all(one.slots <= other.slots for one, other in itertools.pairwise(found))
    assert found[0].slots < found[-1].slots


def test_too_little_is_refused_with_what_is_needed(model, base):
    with pytest.raises(InputError, match="memory does not suffice") as caught:
        plan(model, 10 * MIB)
    told = caught.value.facts["expected"].split("at least ")[1].split(",")[0]
    exact = next(budget for budget in itertools.count(parse_size("", told) - MIB // 50, 512) if fits(model, budget))
    assert plan(model, exact).slots == 2 * model[1].top_k
    assert abs(exact - parse_size("", told)) < MIB // 100


def fits(model, budget):
    try:
        return bool(plan(model, budget))
    except InputError:
        return False


def test_a_dense_model_that_does_not_fit_is_refused(base, tmp_path):
    write_checkpoint(Tiny(family="qwen3_moe", mlp_only_layers=(0, 1, 2, 3)), tmp_path / "source")
    weights = Weights(convert_folder(tmp_path / "source", tmp_path / "out"))
    places = ExpertPlaces(weights)
    assert make_plan(weights, places, Wishes(context=256, kept=0, budget=1 << 40)).slots is None
    with pytest.raises(InputError, match="memory does not suffice"):
        make_plan(weights, places, Wishes(context=256, kept=0, budget=MIB))


def test_float16_experts_have_no_slots(base, tmp_path):
    """Kernels convert them, and know them by where they lie."""
    write_checkpoint(Tiny(dtype="float16", moe_inter=72, mtp=False, visual=False), tmp_path / "source")
    weights = Weights(convert_folder(tmp_path / "source", tmp_path / "out"))
    places = ExpertPlaces(weights)
    whole = make_plan(weights, places, Wishes(context=256, kept=0, budget=1 << 40))
    with pytest.raises(InputError, match="float16"):
        make_plan(weights, places, Wishes(context=256, kept=0, budget=whole.total - 1))


@pytest.mark.parametrize(("kv", "factor"), [(KVFormat.F32, 4), (KVFormat.BF16, 2)])
def test_keys_and_values(model, base, kv, factor):
    """Two layers of full attention, two heads of 64 dims, key and value."""
    found = plan(model, 1 << 40, 1000, kv)
    assert found.items["keys and values of 1,000 tokens"] == 1000 * 2 * 2 * 2 * 64 * factor


def test_the_context_without_a_wish_takes_an_eighth(model, base):
    found = plan(model, 1 << 40, None)
    assert found.context == model[0].spec.max_position_embeddings
    per_token = found.items[f"keys and values of {found.context:,} tokens"] // found.context
    spec = model[0].spec
    small = affordable_context(spec, spec.layers, Wishes(), 8 * 3000 * per_token)
    assert small == plan_module.SHORTEST
    assert affordable_context(spec, spec.layers, Wishes(), 1) == plan_module.SHORTEST
    half = affordable_context(spec, spec.layers[:2], Wishes(), 8 * 2048 * per_token)
    assert half == 2 * affordable_context(spec, spec.layers, Wishes(), 8 * 2048 * per_token) == 4096


def test_without_a_budget_it_is_what_is_free(model, base, monkeypatch):
    """Less an eighth, or less the head-room where that is less."""
    for free, left in ((800 * MIB, 100 * MIB), (64 << 30, plan_module.HEADROOM)):
        monkeypatch.setattr(plan_module, "free_memory", lambda free=free: free)
        assert plan(model, None).budget == free + 200 * MIB - left


# --- the speed to expect ----------------------------------------------------------------------------------------------


def test_hit_rates_rise_with_the_share():
    shares = [i / 512 for i in range(1, 513)]
    rates = [skewed_hit_rate(share) for share in shares]
    assert all(low <= high for low, high in itertools.pairwise(rates))
    assert rates[-1] == 1.0
    assert all(rate >= share for rate, share in zip(rates, shares, strict=True))  # better than uniform


def test_expectations_are_bytes_over_speeds(model):
    places, found = model[1], Speeds(weights=1e9, disk=1e8)
    half = MemoryPlan(1, 1, 0, len(places) // 2, len(places), {"a": 1})
    nbytes = places.top_k * len(places.layers) * places[0, 0].nbytes
    expected = expectations(half, places, 0, 10**6, found)
    seconds = (10**6 + nbytes) / 1e9 + nbytes / 2 / 1e8
    assert expected["uniform routing"].tok_s == pytest.approx(1 / seconds)
    assert expected["skewed routing"].tok_s > expected["uniform routing"].tok_s
    whole = MemoryPlan(1, 1, 0, None, len(places), {"a": 1})
    assert expectations(whole, places, 0, 10**6, found)["all in memory"].tok_s == pytest.approx(1e9 / (10**6 + nbytes))


def test_a_plan_as_text_and_as_json():
    found = MemoryPlan(5 << 30, 4096, 0, 77, 512, {"expert slots": 3 << 30, "dense weights": 1 << 30})
    expected, measured = {"uniform routing": Expectation(0.25, 12.34)}, Speeds(30e9, 2e9)
    text = "\n".join(plan_lines(found, expected, measured))
    for part in (
        "3.00 GiB",
        "4.00 GiB",
        "5.00 GiB",
        "77 of 512",
        "4,096 tokens",
        "30.0 GB/s",
        "2.00 GB/s",
        "25%",
        "12.3",
    ):
        assert part in text, part
    table = plan_dict(found, expected, measured)
    assert table["total_bytes"] == 4 << 30
    assert table["expert_slots"] == 77
    assert table["expected"] == {"uniform routing": {"hit_rate": 0.25, "tok_s": 12.34}}


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """How often speeds were measured; they are kept in a folder of the test's."""
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds_module.machine, "weight_speed", lambda seconds, threads: calls.append("w") or 3e9)
    monkeypatch.setattr(speeds_module.machine, "disk_speed", lambda file, span, seconds: calls.append("d") or 1e9)
    return calls


def test_speeds_are_measured_once(measured, tmp_path):
    for _ in range(2):
        assert speeds(tmp_path, 100, 2) == Speeds(3e9, 1e9)
    assert measured == ["w", "d"]
    speeds(tmp_path, 100, 3)
    assert measured == ["w", "d"] * 2
    speeds(tmp_path, 100, 2)
    assert measured == ["w", "d"] * 2


@pytest.mark.parametrize("content", ["", "[]", "nonsense", '{"x": 1}'])
def test_a_spoilt_file_of_speeds_is_written_anew(measured, tmp_path, content):
    file = tmp_path / "cache" / "mosaic" / "speeds.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    for _ in range(2):
        assert speeds(tmp_path, 100, 2) == Speeds(3e9, 1e9)
    assert measured == ["w", "d"]


def test_speeds_without_a_folder_to_keep_them_in(measured, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert speeds(tmp_path, 100, 2) == Speeds(3e9, 1e9)
    assert measured == ["w", "d"] * 2


# --- sizes and groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("3.5 gib", 7 << 29),
        ("800MB", 800_000_000),
        ("1G", 1 << 30),
        ("4096B", 4096),
        (" 2 TiB ", 2 << 40),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size("--ram", text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "8 GiBi", "1,5GiB", "nan", "0", "0.0GiB", "8GB/s"])
def test_what_is_no_size(text):
    with pytest.raises(InputError, match="--ram is no size"):
        parse_size("--ram", text)


@pytest.mark.parametrize(("text", "advised"), [("8", "8GiB"), (" 3.5 ", "3.5GiB"), ("5000000000", "5000000000B")])
def test_a_size_needs_its_unit(text, advised):
    """8 bytes of memory are nobody's wish."""
    with pytest.raises(InputError, match=f"write {advised}$"):
        parse_size("--ram", text)
    parse_size("--ram", advised)


def test_sizes_are_written_so_that_they_can_be_read():
    for nbytes in (5 << 10, 3 << 20, 7 << 30, 2 << 40):
        assert parse_size("", format_size(nbytes)) == nbytes
    assert format_size(100) == "100 B"


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_memory_", "memory.")).write_text(content)


def test_the_tightest_group_of_version_2_counts(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert cgroup_room(root, own) is None
    group(
        root / "a",
        _memory_max="1000\n",
        _memory_current="300\n",
        _memory_stat="anon 100\nactive_file 20\ninactive_file 30\n",
    )
    group(root / "a" / "b", _memory_max="max\n", _memory_current="200\n")
    assert cgroup_room(root, own) == 750
    group(root / "a" / "b", _memory_max="220\n", _memory_current="200\n")
    assert cgroup_room(root, own) == 20
    group(root, _memory_max="100\n", _memory_current="200\n")
    assert cgroup_room(root, own) == 0


def test_groups_of_version_1(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,memory:/x\n0::/\n")
    group(root / "memory" / "x")
    (root / "memory" / "x" / "memory.limit_in_bytes").write_text("5000")
    (root / "memory" / "x" / "memory.usage_in_bytes").write_text("1000")
    assert cgroup_room(root, own) == 4000


def test_without_groups(tmp_path):
    assert cgroup_room(tmp_path, tmp_path / "nothing") is None
