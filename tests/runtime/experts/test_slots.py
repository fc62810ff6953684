"""SlotPolicy against a dictionary that is searched from end to end, and what holds whatever happens."""

import random

import pytest

from mosaic.runtime.experts.slots import HALF_LIFE, USE, Claim, SlotPolicy, floor

LAYERS, EXPERTS, TOP_K = (1, 2, 5, 7), 6, 2
KEYS = [layer * EXPERTS + expert for layer in LAYERS for expert in range(EXPERTS)]


def layer_of(key: int) -> int:
    return key // EXPERTS


class Model:
    """The policy as its docstring has it: everything is looked up in the history."""

    def __init__(self, slots: int) -> None:
        self.size = slots
        self.floor = min(TOP_K, (slots - 2 * TOP_K) // len(LAYERS))
        self.tick = 0
        self.uses: dict[int, list[int]] = {key: [] for key in KEYS}  # ticks
        self.entries: dict[int, dict[str, int]] = {}
        self.streamed = 0

    def rank(self, key: int) -> tuple[int, int, int]:
        entry = self.entries[key]
        if entry["streamed"]:
            return (-entry["streamed"], 0, 0)
        count = 0
        for period in range(self.tick // HALF_LIFE + 1):
            count = (count >> 1) + USE * sum(tick // HALF_LIFE == period for tick in self.uses[key])
        return (0, count, entry["last"])

    def held(self, layer: int) -> int:
        return sum(layer_of(key) == layer for key in self.entries)

    def victim(self, layer: int) -> int | None:
        allowed = [
            key for key, entry in self.entries.items()
            if not entry["pins"] and (layer_of(key) == layer or self.held(layer_of(key)) > self.floor)
        ]  # fmt: skip
        return min(allowed, key=lambda key: (self.rank(key), self.entries[key]["slot"]), default=None)

    def claim(self, key: int, claim: Claim | None, streaming: bool) -> None:
        """Check a claim, and follow it."""
        full = len(self.entries) == self.size
        victim = self.victim(layer_of(key)) if full else None
        if full and victim is None:
            assert claim is None
            assert sum(entry["pins"] > 0 for entry in self.entries.values()) >= 2 * TOP_K
            return
        assert claim is not None
        assert claim.evicted == victim
        taken = {entry["slot"] for entry in self.entries.values()}
        assert claim.slot == self.entries.pop(victim)["slot"] if full else claim.slot not in taken
        self.streamed += streaming
        streamed = self.streamed if streaming else 0
        self.entries[key] = {"slot": claim.slot, "pins": 1, "last": self.tick, "streamed": streamed}

    def use(self, key: int) -> None:
        self.uses[key].append(self.tick)
        if key in self.entries:
            self.entries[key] |= {"last": self.tick, "streamed": 0}


@pytest.mark.parametrize("slots", [4, 5, 7, 8, 11, 12, 15, 20, 22])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_model(slots, seed):
    draw = random.Random(f"{slots} {seed}")
    policy, model = SlotPolicy(slots, LAYERS, EXPERTS, TOP_K), Model(slots)
    seen = dict.fromkeys(("refused", "evicted", "streamed", "forgotten"), 0)
    for _ in range(2500):
        key = draw.choice(KEYS[::2] if draw.random() < 0.5 else KEYS)
        entry = model.entries.get(key)
        operation = draw.choices(("use", "claim", "unpin", "pin", "forget", "tick"), (30, 30, 34, 4, 2, 12))[0]
        if operation == "use":
            policy.use(key)
            model.use(key)
        elif operation == "claim" and entry is None:
            streaming = draw.random() < 0.2
            full = len(model.entries) == model.size
            assert policy.evicts(key) == (model.victim(layer_of(key)) if full else None)
            claim = policy.claim(key, streaming)
            model.claim(key, claim, streaming)
            seen["refused"] += claim is None
            seen["evicted"] += claim is not None and claim.evicted is not None
            seen["streamed"] += streaming
        elif operation == "unpin":
            pinned = [key for key, entry in model.entries.items() if entry["pins"]]
            if pinned:
                entry = model.entries[draw.choice(pinned)]
                policy.unpin(entry["slot"])
                entry["pins"] -= 1
        elif operation == "pin" and entry:
            policy.pin(entry["slot"])
            entry["pins"] += 1
        elif operation == "forget" and entry:
            policy.forget(key)
            del model.entries[key]
            seen["forgotten"] += 1
        elif operation == "tick":
            policy.tick()
            model.tick += 1
        found = {key: policy.find(key) for key in KEYS}
        assert found == {key: model.entries[key]["slot"] if key in model.entries else None for key in KEYS}
    assert model.tick > 5 * HALF_LIFE
    assert min(seen["evicted"], seen["streamed"], seen["forgotten"]) > 0
    assert seen["refused"] > 0 or slots > 4


@pytest.mark.parametrize("slots", range(2 * TOP_K, len(KEYS) + 1))
def test_two_layers_of_a_token_always_fit_and_floors_hold(slots):
    """Decode with the next layer fetched ahead: what a layer needs is pinned, and as much of the next one."""
    draw = random.Random(slots)
    policy = SlotPolicy(slots, LAYERS, EXPERTS, TOP_K)
    kept = floor(slots, len(LAYERS), TOP_K)
    held = dict.fromkeys(LAYERS, 0)
    pinned: list[list[int]] = []
    for step in range(400):
        layer = LAYERS[step % len(LAYERS)]
        pinned.append([])
        for expert in draw.sample(range(EXPERTS), TOP_K):
            key = layer * EXPERTS + expert
            slot = policy.find(key)
            if slot is None:
                claim = policy.claim(key)
                assert claim is not None
                slot = claim.slot
                held[layer] += 1
                if claim.evicted is not None:
                    loser = layer_of(claim.evicted)
                    held[loser] -= 1
                    assert loser == layer or held[loser] >= kept
            else:
                policy.pin(slot)
            policy.use(key)
            pinned[-1].append(slot)
        if len(pinned) == 2:
            for slot in pinned.pop(0):
                policy.unpin(slot)
        assert sum(held.values()) <= slots
    assert min(held.values()) >= kept  # all layers had their turn


def test_the_floor_is_top_k_once_there_is_room():
    assert [floor(slots, 40, 8) for slots in (16, 55, 56, 335, 336, 10_240)] == [0, 0, 1, 7, 8, 8]


def warmed(slots: int) -> SlotPolicy:
    """Three quarters of the slots hold experts that were used often, a while ago; the rest is free."""
    policy = SlotPolicy(slots, LAYERS, EXPERTS, TOP_K)
    for key in hot(slots):
        for _ in range(4):
            policy.use(key)
        policy.unpin(policy.claim(key).slot)
    for _ in range(3 * HALF_LIFE):
        policy.tick()
    return policy


def hot(slots: int) -> list[int]:
    return sorted(KEYS, key=lambda key: (key % EXPERTS, key))[: slots * 3 // 4]


def read(policy: SlotPolicy, keys: list[int], streaming: bool) -> int:
    """A prompt that reads these experts, two at a time; how many were there."""
    hits = 0
    for wave in zip(keys[::2], keys[1::2], strict=True):
        slots = []
        for key in wave:
            policy.use(key)
            slot = policy.find(key)
            if slot is None:
                slots.append(policy.claim(key, streaming).slot)
            else:
                policy.pin(slot)
                slots.append(slot)
                hits += 1
        for slot in slots:
            policy.unpin(slot)
    return hits


def test_a_long_prompt_leaves_what_decode_has_warmed():
    lost = {}
    for streaming in (True, False):
        policy = warmed(16)
        read(policy, [key for key in KEYS if key not in hot(16)], streaming)
        lost[streaming] = sum(policy.find(key) is None for key in hot(16))
    assert lost[True] == 0
    assert lost[False] > 2 * TOP_K


def test_streamed_entries_take_each_others_slots():
    """So the next chunk finds most of what fitted; if the oldest went it would find nothing."""
    policy = SlotPolicy(16, LAYERS, EXPERTS, TOP_K)
    assert read(policy, KEYS, streaming=True) == 0
    assert read(policy, KEYS, streaming=True) >= 16 - 2 * TOP_K


def test_a_streamed_entry_that_is_used_again_stays():
    policy = SlotPolicy(4, LAYERS, EXPERTS, TOP_K)
    first, second, third, fourth, fifth, sixth = KEYS[:6]
    for key in (first, second, third, fourth):
        policy.unpin(policy.claim(key, streaming=True).slot)
    policy.use(fourth)
    assert policy.claim(fifth).evicted == third  # the newest of those not used again
    assert policy.claim(sixth).evicted == second


def test_the_least_used_goes_and_of_equals_the_one_not_used_for_longest():
    policy = SlotPolicy(4, LAYERS, EXPERTS, TOP_K)
    for key, uses in zip(KEYS[:4], (3, 1, 1, 2), strict=True):
        for _ in range(uses):
            policy.use(key)
        policy.unpin(policy.claim(key).slot)
        policy.tick()
    assert [policy.claim(key).evicted for key in KEYS[4:7]] == [KEYS[1], KEYS[2], KEYS[3]]


def test_uses_count_while_a_key_has_no_slot():
    policy = SlotPolicy(4, LAYERS, EXPERTS, TOP_K)
    for _ in range(5):
        policy.use(KEYS[0])  # not there: routed to, say, in the prompt
    for key in KEYS[:4]:
        policy.unpin(policy.claim(key).slot)
        policy.tick()
    assert policy.claim(KEYS[4]).evicted == KEYS[1]


def test_old_uses_fade():
    policy = SlotPolicy(4, LAYERS, EXPERTS, TOP_K)
    for key in KEYS[:4]:
        policy.unpin(policy.claim(key).slot)
    for _ in range(3):
        policy.use(KEYS[0])
    for _ in range(2 * HALF_LIFE):
        policy.tick()
    for key in KEYS[1:4]:
        policy.use(key)
    assert policy.claim(KEYS[4]).evicted == KEYS[0]  # three uses were worth more, two half-lives ago


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="3 slots, of which two layers need 4"):
        SlotPolicy(3, LAYERS, EXPERTS, TOP_K)
    policy = SlotPolicy(4, LAYERS, EXPERTS, TOP_K)
    slot = policy.claim(KEYS[0]).slot
    with pytest.raises(ValueError, match="has a slot"):
        policy.claim(KEYS[0])
    policy.forget(KEYS[0])
    with pytest.raises(ValueError, match="not pinned"):
        policy.unpin(slot)
    policy.claim(KEYS[1])
    policy.unpin(slot)
    with pytest.raises(ValueError, match="not pinned"):
        policy.unpin(slot)
