"""The program behind `just bench`, with small matrices and without other engines. No speed is tested."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import engine, experts
from bench.engine_table import Series, fit, table
from bench.engine_worker import Worker
from bench.shape import model_config
from mosaic import _native
from mosaic.format.errors import InputError

SIZES = {
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip


def test_experts_alone(capsys):
    experts.command(threads=2, tokens=[1, 20], repetitions=1, experts=8, kt_python=None)
    lines = capsys.readouterr().out.splitlines()
    assert "read ceiling" in lines[0]
    assert {line.split("tokens")[0].strip() for line in lines[1:]} == {"1", "20"}
    assert all(isa in "".join(lines) for isa in _native.isas()[1:])


def test_a_whole_run(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "model_config", lambda layers, vocab: model_config(layers, vocab, SIZES))
    monkeypatch.setattr(engine, "CEILING_SECONDS", 0.01)
    options = [
        "--engine",
        "mosaic-bf16",
        "--engine",
        "llama.cpp",
        "--layers",
        "1",
        "--layers",
        "2",
        "--vocab",
        "512",
        "--prompt",
        "3",
        "--generate",
        "2",
        "--threads",
        "1",
    ]
    done = CliRunner().invoke(engine.app, [str(tmp_path), *options, "--repetitions", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert "llama.cpp is left out: no --llama-python" in done.stderr
    assert "read ceiling" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    measured = [(entry["engine"], entry["test"]) for entry in found["series"]]
    assert measured == [("mosaic-bf16", "decode"), ("mosaic-bf16", "prefill")]
    for entry in found["series"]:
        assert {int(layers): len(times) for layers, times in entry["ms_per_token"].items()} == {1: 1, 2: 1}
        assert (entry["gb_s"] is not None) == (entry["test"] == "decode")
    assert min(found["ceilings"]["read"]) > 0
    assert len(found["ceilings"]["multiply_add"]) == 2
    assert not list(tmp_path.iterdir())


def test_cost_per_layer_and_the_whole_model():
    series = Series("an engine", "decode", nbytes={8: 26e6})
    for times in ((4, 9.0), (4, 11.0), (4, 10.5), (8, 18.5), (8, 20.0), (8, 18.0)):
        series.add(*times)
    assert series.line() == pytest.approx((2.0, 2.5))  # medians 10.5 and 18.5
    assert series.gb_s() == pytest.approx(26 / 18.5)
    found = series.as_dict(ceiling=10.0)
    assert found["ms_at_40_layers"] == pytest.approx(82.5)
    assert found["of_ceiling"] == pytest.approx(26 / 185)
    assert fit({4: 1.0}) is None
    shown = table([series, Series("another", "prefill", {4: [1.0]})], 10.0)
    for text in ("10.50 (9.00, 11.00)", "18.50 (18.00, 20.00)", "82.50", "14%", "another"):
        assert text in shown
    assert len({len(line) for line in shown.splitlines()[:2]}) == 1


def test_bytes_of_a_gguf():
    gguf = pytest.importorskip("bench.write_gguf")
    config = model_config(2, 512, {**SIZES, "num_experts_per_tok": SIZES["num_experts"]})
    embedding = 512 * SIZES["hidden_size"] / 32 * 34
    assert engine.q8_bytes(config) == pytest.approx(gguf.gguf_bytes(config) - embedding)
    assert engine.q8_bytes(model_config(2, 512, SIZES)) < engine.q8_bytes(config)


def test_an_engine_that_ends_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(InputError, match=r"(?s)engine x ended.*exit code 3.*no such thing"):
        Worker("x", [sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"],
               tmp_path / "log")  # fmt: skip
    worker = Worker("y", [sys.executable, "-c", "print({})"], tmp_path / "log")
    with pytest.raises(InputError, match="engine y ended"):
        worker.ask("decode", 1)
    worker.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "0"], "--layers"),
        (["--vocab", "500"], "--vocab is not usable"),
        (["--llama-python", "/nonexistent/python"], "--llama-python cannot be run"),
    ],
    ids=str,
)
def test_bad_options_are_refused(tmp_path, options, words):
    done = CliRunner().invoke(engine.app, [str(tmp_path), *options])
    assert done.exit_code != 0
    assert words in done.output + str(done.exception)
    assert not list(tmp_path.iterdir())


def test_one_layer_is_refused_with_llama(monkeypatch):
    monkeypatch.setattr(engine, "_has_llama", lambda python: True)
    done = CliRunner().invoke(engine.app, ["--layers", "1", "--llama-python", sys.executable])
    assert isinstance(done.exception, InputError)
    assert "linear attention" in str(done.exception)


def test_both_sides_feed_the_same_number_of_tokens():
    """engine_llama cannot import Mosaic, and so repeats two constants."""
    from mosaic.runtime.bench import SHORT_PROMPT
    from mosaic.runtime.prefill import PREFILL_CHUNK

    text = (Path(engine.__file__).parent / "engine_llama.py").read_text()
    assert f"SHORT_PROMPT = {SHORT_PROMPT} " in text
    assert f"CHUNK = {PREFILL_CHUNK} " in text
