"""mosaic-bench --simulate: its lines and its figures are the simulation's, and what cannot be simulated is refused."""

import json
import re
import sys

import numpy as np
import pytest

from mosaic.runtime import bench_simulate
from mosaic.runtime.bench_cli import main
from mosaic.runtime.bench_simulate import sizes_in
from mosaic.runtime.experts.trace import Trace, TraceHeader, TraceWriter
from mosaic.runtime.hardware import FOLDER, known, load
from mosaic.runtime.simulator.budget import make_budget
from mosaic.runtime.simulator.simulation import simulate
from mosaic.runtime.simulator.sizes import published

LAPTOP = "rtx4060-laptop"
MIB = 1 << 20


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs mosaic-bench in this process: (exit code, standard output, error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mosaic-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def short(monkeypatch, tmp_path):
    """Instead of the bundled trace its first tokens, so that tests are quick."""
    file = tmp_path / "short.trace"
    data = bench_simulate.BUNDLED.read_bytes()
    header = data.index(b"\n") + 1
    file.write_bytes(data[: header + 30 * 40 * 8 * 2])
    monkeypatch.setattr(bench_simulate, "BUNDLED", file)
    return bench_simulate.read_trace(file)


def figures(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def expected(trace: Trace, name: str, sizes, vram: int, ram: int | None = None) -> dict:
    budget = make_budget(load(name), sizes, vram, ram)
    outcome = simulate(trace, load(name), sizes, budget)
    return {
        "vram_bytes": vram, "vram_slots": budget.vram_slots, "ram_slots": budget.ram_slots,
        "tok_s": outcome.tok_s, "vram_hit_rate": outcome.vram_hit_rate, "ram_hit_rate": outcome.ram_hit_rate,
        "pcie_bytes_per_token": outcome.pcie_nbytes / outcome.tokens,
        "pcie_bytes_per_token_all_copied": outcome.offloading_nbytes / outcome.tokens, "pcie_less": outcome.less,
    }  # fmt: skip


def test_the_published_model_on_a_laptop(bench, short):
    code, out, err = bench("--simulate", LAPTOP, "--json")
    assert code == 0
    found = figures(out)
    assert [round(budget["vram_bytes"] / (1 << 30), 2) for budget in found["budgets"]] == [1, 2, 3.2, 4, 6]
    for budget in found["budgets"]:
        due = expected(short, LAPTOP, published(), budget["vram_bytes"])
        assert {name: budget[name] for name in due} == due
        assert sum(budget["seconds_per_token"].values()) == pytest.approx(1 / budget["tok_s"])
    chosen = found["budgets"][2]
    assert {name: found[name] for name in chosen} == chosen
    assert (found["profile"], found["model"], found["trace"]) == (LAPTOP, "Qwen3.6-35B-A3B", None)
    assert "synthetic, published, bundled with Mosaic: not recorded from a model; 30 tokens, of which 7 only" in out
    assert "not measured" in out
    assert f"expected: {chosen['tok_s']:.1f} tok/s" in out
    less, claim = re.search(r": ([\d.]+)% less \(claimed: (.*)\)", out).groups()
    assert (float(less), claim) == (round(100 * chosen["pcie_less"], 1), "over 70 %")
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d\.\d\d +[\d,]+ ", line)]
    assert [row[0] for row in rows] == ["1.00", "2.00", "3.20", "4.00", "6.00"]
    for row, budget in zip(rows, found["budgets"], strict=True):
        assert row[1] == f"{budget['vram_slots']:,}"
        assert row[4] == f"{budget['tok_s']:.1f}"
        assert row[5] == f"{budget['pcie_bytes_per_token'] / MIB:.2f}"
        assert row[7] == f"{budget['pcie_less']:.1%}"
    assert "simulating with 3.20 GiB" in err


def test_sizes_are_chosen(bench, short):
    _, out, err = bench("--simulate", LAPTOP, "--vram", "3GiB", "--ram", "6GiB", "--json")
    found = figures(out)
    due = expected(short, LAPTOP, published(), 3 << 30, 6 << 30)
    assert {name: found[name] for name in due} == due
    assert [budget["vram_bytes"] >> 20 for budget in found["budgets"]] == [1024, 2048, 3072, 3276, 4096, 6144]
    _, out, err = bench("--simulate", LAPTOP, "--vram", "3GiB", "--ram", "1.1GiB", "--json")
    assert [budget["vram_bytes"] >> 20 for budget in figures(out)["budgets"]] == [1024, 2048, 3072, 3276, 4096]
    assert "6.00 GiB of VRAM left out: the memory does not suffice" in err


def test_a_machine_without_a_gpu(bench, short):
    code, out, _ = bench("--simulate", "cpu-laptop", "--json")
    assert code == 0
    found = figures(out)
    assert found["vram_slots"] == found["pcie_bytes_per_token"] == found["gpu_layers"] == 0
    assert f"hits: {found['ram_hit_rate']:.1%} in RAM" in out
    assert not re.search(r"PCIe:|VRAM", out)


def test_a_model_directory_with_its_recorded_routing(bench, demo, recorded):
    file, trace = recorded
    code, out, _ = bench(demo, "--simulate", LAPTOP, "--trace", file, "--vram", "4MiB", "--json")
    assert code == 0
    found = figures(out)
    due = expected(trace, LAPTOP, sizes_in(demo), 4 << 20)
    assert {name: found[name] for name in due} == due
    assert 0 < found["vram_hit_rate"] < 1
    assert found["trace"] == str(file)
    assert "bundled" not in out
    assert found["budgets"][-1]["pcie_less"] is None  # all of its experts fit
    assert " nothing" in out


def test_on_recorded_routing_the_claim_holds(bench, demo, recorded):
    """A quarter of the experts in VRAM, although the demo uses them nearly alike."""
    file, _ = recorded
    sizes = sizes_in(demo)
    quarter = sizes.num_experts * sizes.expert // 4
    for machine in ("rtx4060-laptop", "rtx5070-laptop"):
        _, out, _ = bench(demo, "--simulate", machine, "--trace", file, "--vram", f"{quarter}B", "--json")
        found = figures(out)
        assert found["vram_slots"] == 32
        assert found["pcie_less"] > 0.7


def test_a_profile_of_ones_own(bench, short, tmp_path):
    file = tmp_path / "mine.yaml"
    text = (FOLDER / "cpu-laptop.yaml").read_text()
    file.write_text(text.replace("title: laptop", "title: mine"))
    assert bench("--simulate", file)[1].startswith("mine without a GPU")


def test_the_known_ones_are_listed(bench):
    code, out, err = bench("--simulate", "list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == known()
    assert "RTX 4060" in out


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--demo", "--trace", "a.trace"), ("--trace needs --simulate",)),
        (("--replay", "a.trace", "--vram", "1GiB"), ("--vram means nothing with --replay",)),
        (("--simulate", LAPTOP, "--device", "cuda"), ("--device means nothing with --simulate",)),
        (("--simulate", LAPTOP, "--gpu-layers", "4"), ("--gpu-layers means nothing with --simulate",)),
        (("--simulate", LAPTOP, "--slots", 9), ("--slots needs --replay",)),
        (("--simulate", LAPTOP, "--replay", "a.trace"), ("--replay means nothing with --simulate",)),
        (("--simulate", LAPTOP, "--threads", 2), ("--threads means nothing",)),
        (("--simulate", LAPTOP, "--prompt", 2), ("--prompt means nothing",)),
        (("--simulate", "list", "--json"), ("--json means nothing",)),
        (("--simulate", "list", "--vram", "1GiB"), ("--vram means nothing",)),
        (("somewhere", "--demo", "--simulate", LAPTOP), ("OUT and --demo together",)),
        (("somewhere", "--simulate", LAPTOP), ("no such model directory",)),
        (("--simulate", "rtx4060"), ("did you mean rtx4060-laptop",)),
        (("--simulate", ""), ("cannot read a hardware profile",)),
        (("--simulate", LAPTOP, "--vram", "lots"), ("--vram is no size",)),
        (("--simulate", LAPTOP, "--vram", "9GiB"), ("this VRAM for experts", "to 7.10 GiB")),
        (("--simulate", LAPTOP, "--vram", "1MiB"), ("this VRAM for experts", "48.01 MiB to")),
        (("--simulate", LAPTOP, "--ram", "17GiB"), ("more memory than this machine has",)),
        (("--simulate", LAPTOP, "--ram", "1GiB"), ("memory does not suffice",)),
        (("--simulate", "cpu-laptop", "--vram", "1GiB"), ("has no VRAM",)),
        (("--simulate", LAPTOP, "--trace", "nowhere.trace"), ("cannot read a trace",)),
        ((), ("one of OUT, --demo, --replay and --simulate",)),
    ],
)
def test_what_makes_no_sense_is_refused(bench, arguments, words):
    refused(bench(*arguments), *words)


def test_traces_of_other_models_are_refused(bench, demo, recorded, tmp_path):
    file, _ = recorded
    refused(bench("--simulate", LAPTOP, "--trace", file), "a trace of another model", "name the model directory")
    refused(bench(demo, "--simulate", LAPTOP), "no routing of this model", "record one with mosaic-run")
    other = tmp_path / "other.trace"
    header = TraceHeader("other", tuple(range(1, 41)), 256, 8, 1)
    with TraceWriter(other, header) as writer:
        for layer in header.layers:
            writer.record(layer, np.arange(8)[None])
    refused(bench("--simulate", LAPTOP, "--trace", other), "a trace of another model", "40 layers, 1 to 40, of")
    empty = tmp_path / "empty.trace"
    TraceWriter(empty, TraceHeader("none", tuple(range(40)), 256, 8, 1)).close()
    refused(bench("--simulate", LAPTOP, "--trace", empty), "a trace without tokens")
