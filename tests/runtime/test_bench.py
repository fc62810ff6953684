"""mosaic-bench: its figures fit together, bad arguments are refused. How fast anything is, is not tested."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mosaic import _native
from mosaic.runtime import machine
from mosaic.runtime.bench import random_tokens
from mosaic.runtime.bench_cli import main
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.weights import Weights

PROGRAM = str(Path(sys.executable).with_name("mosaic-bench"))
SHORT = ("--prompt", 5, "--generate", 3, "--repetitions", 2)
FAST = ("model", "isa", "prompt", "generate", "repetitions", "threads", "ops", "activations", "kv")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs mosaic-bench in this process, with little time for the ceiling: (exit code, standard output, error)."""
    monkeypatch.setattr("mosaic.runtime.bench_measure.CEILING_SECONDS", 0.01)
    monkeypatch.setattr(machine, "CEILING_BYTES", 1 << 20)
    threads = _native.threads()

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mosaic-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    yield run
    _native.set_threads(threads)
    torch.set_num_threads(1)  # as conftest.py has it


def figures(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_figures_fit_together(bench, tiny):
    code, out, _ = bench(tiny, *SHORT, "--threads", 2, "--json")
    assert code == 0
    found = figures(out)
    assert {name: found[name] for name in FAST} == {
        "model": str(tiny), "isa": _native.isa(), "prompt": 5, "generate": 3, "repetitions": 2, "threads": 2,
        "ops": "cpu", "activations": "f32", "kv": "bf16",
    }  # fmt: skip
    for name in ("prefill_tok_s", "decode_tok_s", "decode_gb_s", "read_ceiling_gb_s", "weight_bytes_per_token"):
        assert found[name] > 0, name
    assert found["peak_rss_bytes"] > 50_000_000  # torch alone is more
    assert found["decode_gb_s"] == pytest.approx(found["decode_tok_s"] * found["weight_bytes_per_token"] / 1e9)
    assert found["read_share"] == pytest.approx(found["decode_gb_s"] / found["read_ceiling_gb_s"])
    prefill, decode = found["tests"]
    assert (prefill["name"], decode["name"]) == ("pp5", "tg3")
    for test, speed in ((prefill, found["prefill_tok_s"]), (decode, found["decode_tok_s"])):
        assert len(test["values"]) == 2
        assert test["tok_s"] == speed == pytest.approx(sum(test["values"]) / 2)  # the median of two
        assert (test["min"], test["max"]) == (min(test["values"]), max(test["values"]))


def test_sizes_may_be_repeated_and_a_person_sees_all_of_them(bench, tiny):
    code, out, err = bench(tiny, *SHORT, "--prompt", 600, "--generate", 4)
    assert code == 0
    for name in ("pp5", "pp600", "tg3", "tg4"):
        assert re.search(rf"^{name} +\d", out, re.MULTILINE), name
        assert f"{name}, 2 of 2" in err
    assert "medians of 2" in out
    assert "read ceiling" in out
    assert "{" not in out
    assert len(re.findall(r"^tg.*%$", out, re.MULTILINE)) == 2


def test_the_first_sizes_are_those_of_the_summary(bench, tiny):
    found = figures(bench(tiny, *SHORT, "--prompt", 7, "--generate", 4, "--json")[1])
    assert (found["prompt"], found["generate"]) == (5, 3)
    assert [test["name"] for test in found["tests"]] == ["pp5", "pp7", "tg3", "tg4"]
    assert found["prefill_tok_s"] == found["tests"][0]["tok_s"]


def test_the_reference_is_measured_too(bench, tiny):
    code, out, _ = bench(tiny, *SHORT, "--ops", "reference", "--kv", "f32", "--json")
    assert code == 0
    found = figures(out)
    assert (found["ops"], found["activations"], found["kv"]) == ("reference", None, "f32")


def test_bf16_activations_are_measured_too(bench, tiny):
    code, out, _ = bench(tiny, *SHORT, "--activations", "bf16")
    assert code == 0
    assert "bf16 activations" in out


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, as far as anybody looks: the host's memory."""
    monkeypatch.setattr("mosaic.runtime.ops.cuda.find.find_gpu", lambda number: HostDevice(room=1 << 30))


def test_what_lies_on_a_device_and_what_it_is_used_for(bench, demo, gpu):
    sizes = ("--prompt", 5, "--generate", 40, "--repetitions", 2)
    code, out, err = bench(demo, *sizes, "--vram", "4MiB", "--gpu-layers", 2, "--json")
    assert code == 0, err
    found = figures(out)
    slot = ExpertPlaces(Weights(demo))[0, 0].nbytes
    assert found["device"] == "the host's memory"
    assert (found["device_slots"], found["device_layers"], found["device_head"]) == ((4 << 20) // slot, 2, False)
    assert found["vram_bytes"] == found["device_slots"] * slot
    assert found["vram_bytes"] < found["vram_total_bytes"] < 1 << 30
    assert found["prefill_piece"] == 2048
    prefill, decode = found["tests"]
    assert decode["device_hits_per_token"] > 0
    measured = 10 * prefill["device_bytes_per_token"] + 80 * decode["device_bytes_per_token"]
    assert measured % slot == 0
    assert 0 < measured <= found["device_bytes"]  # of the warm-up, too
    assert f"on the host's memory: {found['device_slots']:,} expert slots, 2 dense layers, without the head" in out
    assert re.search(rf"^tg40 .*%\s+{decode['device_hits_per_token']:.1f}\s+[\d.]+ \w+$", out, re.MULTILINE)


def test_a_long_prompt_is_read_in_the_pieces_of_the_device_and_streamed(bench, demo, gpu):
    code, out, _ = bench(demo, "--prompt", 600, "--generate", 2, "--repetitions", 1, "--json")
    assert code == 0
    found = figures(out)
    assert found["tests"][0]["device_bytes_per_token"] > 0
    assert found["device_head"] is True


@pytest.mark.parametrize("options", [(), ("--device", "auto"), ("--device", "cpu"), ("--ops", "reference")], ids=str)
def test_without_a_device_nothing_is_said_of_one(bench, tiny, options):
    code, out, _ = bench(tiny, *SHORT, *options, "--json")
    assert code == 0
    assert "copied" not in out.rpartition("\n{")[0]
    found = figures(out)
    assert {found[name] for name in ("device", "vram_bytes", "device_slots", "device_layers", "device_head")} == {None}
    assert found["prefill_piece"] == 1024


def test_the_demo_as_a_process(demo):
    command = [PROGRAM, str(demo), *map(str, SHORT), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MOSAIC_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert figures(done.stdout)["threads"] == 1
    assert "warming up" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt", 0), ("--prompt",)),
        (("--generate", -1), ("--generate",)),
        (("--repetitions", 0), ("--repetitions",)),
        (("--threads", 0), ("--threads",)),
        (("--prompt", "many"), ("--prompt", "integer")),
        (("--prompt", 5000), ("--prompt 5000", "4,096", "fewer")),
        (("--generate", 4090), ("--generate 4090", "4,106 tokens", "4,096")),
        (("--kv", "int8"), ("--kv", "int8", "f32, bf16, e4m3")),
        (("--ops", "gpu"), ("--ops", "gpu", "cpu, reference")),
        (("--activations", "f16"), ("--activations", "f16", "f32, bf16")),
        (("--device", "tpu"), ("--device", "tpu", "cuda:N")),
        (("--device", "cpu", "--vram", "1GiB"), ("--vram means nothing with --device cpu",)),
        (("--device", "cpu", "--gpu-layers", 1), ("--gpu-layers means nothing with --device cpu",)),
        (("--device", "cuda", "--ops", "reference"), ("a device needs the CPU's kernels",)),
        (("--vram", "much"), ("--vram is no size",)),
        (("--no-such-option",), ("--no-such-option",)),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(bench, tiny, options, words):
    code, out, err = bench(tiny, *options)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize("arguments", [(), ("--demo", "somewhere")], ids=str)
def test_unclear_commands_are_refused(bench, arguments):
    code, _, err = bench(*arguments)
    assert code == 2
    assert "what to measure is not clear" in err


def test_a_missing_directory_is_refused(bench, tmp_path):
    code, _, err = bench(tmp_path / "none")
    assert code == 2
    assert "no such model directory" in err


@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_kernels_that_are_not_to_be_had_are_refused(tiny, ops):
    environment = {**os.environ, "MOSAIC_ISA": "mmx"}
    done = subprocess.run([PROGRAM, str(tiny), "--ops", ops], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "MOSAIC_ISA" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_no_torch():
    done = subprocess.run([sys.executable, "-X", "importtime", PROGRAM, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "import time:" in line}
    assert "mosaic.runtime.bench_cli" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "tokenizers", "numpy.random")}
    options = "--demo --replay --slots --device --vram --gpu-layers --prompt --generate --threads --ops --kv"
    for option in options.split():
        assert re.search(rf"{option}\b.*\w", done.stdout), option


def test_tokens_are_the_same_every_time_and_begin_alike():
    tokens = random_tokens(261, 40)
    assert tokens == random_tokens(261, 40)
    assert tokens[:10] == random_tokens(261, 10)
    assert min(tokens) >= 0
    assert 261 > max(tokens) > 100
