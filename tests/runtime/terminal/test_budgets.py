"""Runs within a budget of memory: told before, kept, and the words are the same."""

import json
import subprocess

from support.mosaic_run import PROGRAM, PROMPT, run


def test_a_plan_and_the_same_words_within_it(demo, tmp_path):
    """A budget that has no room for all experts: told beforehand, kept, and the answer is the same."""
    cache, options = {"XDG_CACHE_HOME": str(tmp_path)}, ("--context", 512, "--device", "cpu")
    whole = json.loads(run(demo, "--plan", "--stats", "json", *options, **cache).stdout)
    assert whole["expert_slots"] is None
    assert whole["vram"] is None
    assert whole["total_bytes"] == sum(whole["items"].values()) <= whole["budget_bytes"]
    ram = f"{whole['total_bytes'] - (8 << 20)}B"
    text = run(demo, "--plan", "--ram", ram, *options, **cache)
    assert text.returncode == 0
    assert "expert slots" in text.stdout
    assert "expected with uniform routing" in text.stdout
    answer = (PROMPT, "--temperature", 0, "--max-tokens", 20, *options)
    plain, bounded = run(demo, *answer), run(demo, *answer, "--ram", ram, "--stats", "json")
    assert bounded.stdout == plain.stdout
    figures = json.loads(bounded.stderr.splitlines()[-1])
    assert figures["expert_misses"] > 0
    assert figures["disk_bytes"] > 0


def test_recorded_routing_is_replayed(demo, tmp_path):
    file = tmp_path / "demo.trace"
    assert run(demo, PROMPT, "--max-tokens", 20, "--record-routing", file).returncode == 0
    replayed = subprocess.run(
        [PROGRAM.replace("mosaic-run", "mosaic-bench"), "--replay", file, "--slots", "40", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "hit rate" in replayed.stdout or "ours" in replayed.stdout
    assert json.loads(replayed.stdout.splitlines()[-1])
