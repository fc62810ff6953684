"""The words for where experts were found."""

from dataclasses import replace

from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.request import Stats
from mosaic.runtime.terminal.figures import tier_text

HOST = Traffic(hits=30, misses=10)


def text(traffic: Traffic) -> str:
    stats = Stats()
    stats.traffic = traffic
    return tier_text(stats.as_dict())


def test_without_a_device_nothing_is_said_of_it():
    assert text(HOST) == "75.0% in memory"


def test_with_a_device_its_share_comes_first():
    found = text(replace(HOST, device_hits=60, device_bytes=12_345))
    assert found == "60.0% on the device, 12,345 bytes copied there; of the others 75.0% in memory"


def test_a_device_that_has_had_nothing_to_do_yet():
    assert text(Traffic(device_bytes=7)).startswith("0.0% on the device, 7 bytes copied there")
