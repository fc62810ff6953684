"""Routing profiles: counted, saved, summed, refused; and the order of a warm start."""

import json

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.experts.profile import Profile, from_trace, load, warm
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import Trace, TraceHeader

LAYERS = (1, 4)
VALUES = {"mosaic_profile": 1, "layers": [1, 4], "num_experts": 3, "uses": [[5, 0, 9], [1, 2, 3]]}
PROFILE = Profile(LAYERS, np.array(VALUES["uses"]))


def test_uses_of_a_trace():
    experts = np.array([[[0, 2], [1, 2]], [[2, 0], [0, 1]], [[2, 1], [2, 1]]], np.uint16)
    profile = from_trace(Trace(TraceHeader("m", LAYERS, 3, 2, 1), experts))
    assert profile.layers == LAYERS
    assert profile.uses.tolist() == [[2, 1, 3], [1, 3, 2]]


def test_round_trip(tmp_path):
    file = tmp_path / "profile.json"
    PROFILE.save(file)
    assert json.loads(file.read_text()) == VALUES
    found = load(file, LAYERS, 3)
    assert (found.layers, found.uses.tolist()) == (LAYERS, VALUES["uses"])


def test_merging_adds():
    other = Profile(LAYERS, np.array([[1, 1, 1], [0, 0, 7]]))
    assert (PROFILE + other).uses.tolist() == [[6, 1, 10], [1, 2, 10]]
    with pytest.raises(ValueError, match="different models"):
        PROFILE + Profile((1, 5), PROFILE.uses)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mosaic_profile": 2}, "of this model"),
        ({"layers": [1, 5]}, "of this model"),
        ({"num_experts": 4}, "of this model"),
        ({"uses": 3}, "not a sound"),
        ({"uses": [[5, 0, 9]]}, "not a sound"),
        ({"uses": [[5, 0, 9], 3]}, "not a sound"),
        ({"uses": [[5, 0, 9], [1, 2]]}, "not a sound"),
        ({"uses": [[5, 0, 9], [1, 2, -1]]}, "not a sound"),
        ({"uses": [[5, 0, 9], [1, 2, True]]}, "not a sound"),
        ({"uses": [[5, 0, 9], [1, 2, 1 << 64]]}, "not a sound"),
    ],
    ids=str,
)
def test_hostile_files(tmp_path, change, words):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(VALUES | change))
    with pytest.raises(InputError, match=words) as caught:
        load(file, LAYERS, 3)
    assert caught.value.facts["file"] == str(file)


def test_warm_start_loads_the_floors_first_and_then_the_most_used():
    uses = np.array([[9, 8, 7, 6, 5, 0], [4, 3, 2, 1, 0, 0]])
    profile = Profile(LAYERS, uses)
    # Eight slots of which 2 * 2 are left to all: floors of 2.
    assert warm(profile, 8, 2) == [6, 7, 24, 25, 8, 9, 10, 26]
    assert warm(profile, 5, 2) == [6, 7, 8, 9, 10]  # no floors
    assert warm(profile, 12, 2) == [6, 7, 24, 25, 8, 9, 10, 26, 27]  # what was never used stays out


def test_the_last_of_a_warm_start_goes_first():
    profile = Profile(LAYERS, np.array([[9, 8, 7, 6, 5, 0], [4, 3, 2, 1, 0, 0]]))
    policy = SlotPolicy(8, LAYERS, 6, 2)
    for key in warm(profile, 8, 2):
        policy.unpin(policy.claim(key).slot)
    assert [policy.claim(key).evicted for key in (11, 27)] == [26, 10]
