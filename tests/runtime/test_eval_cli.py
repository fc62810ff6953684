"""mosaic-eval as its users meet it: a table, JSON, evaluation.json; and what is refused."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mosaic import _native
from mosaic.format.catalog import read_catalog
from mosaic.format.evaluation import EVALUATION_FILE, read_evaluations
from mosaic.recipes import DEMO_CHECKPOINT, FOLDER
from mosaic.runtime.eval_cli import main
from support.faults import edit
from support.tiny import Tiny, write_checkpoint

PROGRAM = str(Path(sys.executable).with_name("mosaic-eval"))
HELDOUT = FOLDER / "demo" / "heldout"
SENTENCE = "It is a truth universally acknowledged. " * 5  # 200 tokens: those of `tiny` are bytes


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """Runs mosaic-eval in this process: (exit code, standard output, error)."""
    threads = _native.threads()

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mosaic-eval", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    yield run
    _native.set_threads(threads)
    torch.set_num_threads(1)  # as conftest.py has it


@pytest.fixture
def model(tiny, tmp_path):
    """A model directory to write to."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(SENTENCE)
    return file


def last_line(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def kept(model):
    return read_evaluations(model, read_catalog(model).plan_digest)


def test_table_json_and_file_agree(evaluate, model, tiny_checkpoint, text):
    code, out, err = evaluate(model, "--text", text, "--against", tiny_checkpoint, "--context", 64, "--json")
    assert code == 0, err
    found = last_line(out)
    assert {name: found[name] for name in ("text", "context", "windows", "tokens", "ops", "activations", "kv")} == {
        "text": "text.txt",
        "context": 64,
        "windows": 4,
        "tokens": 196,
        "ops": "cpu",
        "activations": "f32",
        "kv": "bf16",
    }
    comparison = found["comparison"]
    assert (comparison["reference"], comparison["dtypes"]) == ("checkpoint", ["BF16"])
    ratio = found["perplexity"]["value"] / comparison["perplexity"]["value"]
    assert comparison["ratio"]["value"] == pytest.approx(ratio)
    divergence = comparison["divergence"]
    assert 0 < divergence["median"] < divergence["p99"] <= divergence["maximum"]
    assert 0 < divergence["mean"] < divergence["maximum"]
    assert 0 < comparison["same_top"] <= 1
    for shown in (
        "text.txt: 196 tokens scored, in windows of 64",
        f"perplexity            {found['perplexity']['value']:.6g} +- ",
        f"{divergence['mean']:.6f} +- ",
        f"{comparison['same_top']:.3%}",
        "(checkpoint, BF16)",
    ):
        assert shown in out
    assert json.loads((model / EVALUATION_FILE).read_text())["evaluations"] == [found]
    assert f"kept in {model / EVALUATION_FILE}" in err


def test_without_a_reference(evaluate, model, text):
    code, out, _ = evaluate(model, "--text", text)
    assert code == 0
    assert "{" not in out
    assert "KL" not in out
    (evaluation,) = kept(model)
    assert evaluation.comparison is None
    assert (evaluation.context, evaluation.windows, evaluation.tokens) == (2048, 1, 199)


def test_against_itself(evaluate, model, tiny, text):
    comparison = last_line(evaluate(model, "--text", text, "--against", tiny, "--json")[1])["comparison"]
    assert set(comparison["divergence"].values()) == {0.0}
    assert comparison["same_top"] == 1
    assert comparison["ratio"] == {"value": 1.0, "error": 0.0}
    assert comparison["reference"] == "recipe e4m3"
    assert comparison["dtypes"] == ["BF16", "F8_E4M3"]


def test_results_are_kept_side_by_side_and_hold_no_place(evaluate, tiny, text, tmp_path):
    """The same file of two directories, whatever the number of threads; another text is one more result."""
    one, two = (shutil.copytree(tiny, tmp_path / name / "deep" / name) for name in ("one", "two"))
    other = tmp_path / "other.txt"
    other.write_text(SENTENCE.upper())
    for model, threads in ((one, 1), (two, 2)):
        for file in (text, other, text):
            assert evaluate(model, "--text", file, "--threads", threads)[0] == 0
    assert [evaluation.text for evaluation in kept(one)] == ["other.txt", "text.txt"]
    assert (one / EVALUATION_FILE).read_bytes() == (two / EVALUATION_FILE).read_bytes()
    assert str(tmp_path) not in (one / EVALUATION_FILE).read_text()


@pytest.mark.parametrize(
    ("tokens", "context", "windows", "scored"),
    [(2, 2, 1, 1), (3, 2, 1, 1), (4, 2, 2, 2), (65, 64, 1, 63), (66, 64, 2, 64), (1000, 200, 1, 199), (10, 64, 1, 9)],
)
def test_windows(evaluate, model, text, tokens, context, windows, scored):
    found = last_line(evaluate(model, "--text", text, "--tokens", tokens, "--context", context, "--json")[1])
    assert (found["windows"], found["tokens"]) == (windows, scored)
    assert (found["perplexity"]["error"] is None) == (scored == 1)


def test_operations_change_little(evaluate, model, text):
    """float32 against float64, and rounded activations, which no tiny model can tell from noise."""
    values = []
    for options in (("--ops", "reference"), ("--ops", "cpu"), ("--activations", "bf16"), ("--kv", "e4m3")):
        code, out, err = evaluate(model, "--text", text, "--kv", "f32", "--json", *options)
        assert code == 0, err
        values.append(last_line(out)["perplexity"]["value"])
    assert values[1] == pytest.approx(values[0], rel=4e-4)  # twice the bound of logits
    assert values[0] != values[1]
    assert values[2:] == pytest.approx([values[0]] * 2, rel=0.1)
    assert [evaluation.activations for evaluation in kept(model)] == [None, "f32", "bf16", "f32"]
    assert len(kept(model)) == 4


def test_the_demo_as_a_process(demo):
    command = [PROGRAM, demo, "--text", HELDOUT / "bible.txt", "--tokens", "512", "--context", "256", "--json"]
    command += ["--against", DEMO_CHECKPOINT]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, "MOSAIC_THREADS": "1"}
    )
    (demo / EVALUATION_FILE).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    found = last_line(done.stdout)
    assert 10 < found["perplexity"]["value"] < 50
    assert found["comparison"]["ratio"]["value"] == pytest.approx(1, abs=0.05)
    assert found["comparison"]["divergence"]["mean"] < 0.02
    assert found["comparison"]["same_top"] > 0.9


def test_a_directory_that_cannot_be_written_to(evaluate, model, text, monkeypatch):
    def refuse(file, data):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    monkeypatch.setattr("mosaic.format.evaluation.write_durably", refuse)
    code, out, err = evaluate(model, "--text", text, "--json")
    assert code == 0
    assert last_line(out)["tokens"] == 199
    assert "note: not kept" in err
    assert os.strerror(errno.EROFS) in err


def test_a_full_disk(evaluate, model, text, monkeypatch):
    """Under the states: refused before hours of work. Under the result: shown, then the error."""

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mosaic.runtime.layer_major.free_memory", lambda: 0)
        patch.setattr(os, "posix_fallocate", refuse)
        refused(evaluate(model, "--text", text), "no room for the states", os.strerror(errno.ENOSPC), "TMPDIR")
    monkeypatch.setattr("mosaic.format.evaluation.write_durably", refuse)
    code, out, err = evaluate(model, "--text", text, "--json")
    assert code == 2
    assert last_line(out)["tokens"] == 199
    assert "cannot keep the result" in err
    assert os.strerror(errno.ENOSPC) in err


def refused(result, *words):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--context", 1), ("--context", "2 to 4,096")),
        (("--context", 4097), ("--context", "2 to 4,096")),
        (("--tokens", 1), ("--tokens",)),
        (("--kv", "int8"), ("--kv", "f32, bf16, e4m3")),
        (("--ops", "gpu"), ("--ops", "cpu, reference")),
        (("--activations", "f16"), ("--activations", "f32, bf16")),
        (("--threads", 0), ("--threads",)),
        (("--against", "nowhere"), ("no such checkpoint directory", "nowhere")),
        (("--no-such-option",), ("--no-such-option",)),
    ],
    ids=str,
)
def test_bad_options_are_refused(evaluate, tiny, text, options, words):
    refused(evaluate(tiny, "--text", text, *options), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("no such text", "nothing")),
        (b"", ("too little text", "0 tokens")),
        (b"a", ("too little text", "1 tokens", "at least 2")),
        (b"caf\xe9 au lait", ("not UTF-8", "0xe9", "text.txt")),
        ("caf\xe9".encode("utf-16"), ("not UTF-8",)),
    ],
    ids=str,
)
def test_texts_that_are_none(evaluate, tiny, tmp_path, content, words):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    refused(evaluate(tiny, "--text", file), *words, "text.txt")


def test_a_directory_is_no_text(evaluate, tiny, tmp_path):
    refused(evaluate(tiny, "--text", tmp_path), "no such text", "a directory or a device")


def test_arguments_that_are_not_clear(evaluate, tiny, text):
    refused(evaluate("--text", text), "which model is not clear", "neither")
    refused(evaluate(tiny, "--demo", "--text", text), "which model is not clear", "together")
    refused(evaluate(tiny), "--text")


def test_directories_that_are_no_model(evaluate, tiny_checkpoint, tmp_path, text, model):
    refused(evaluate(tmp_path / "none", "--text", text), "no such model directory")
    refused(evaluate(tiny_checkpoint, "--text", text), "not a Mosaic model directory", "mosaic-convert")
    other = tmp_path / "other"
    (other / ".mosaic-convert").mkdir(parents=True)
    refused(evaluate(model, "--text", text, "--against", other), "an unfinished conversion")


def test_other_vocabularies(evaluate, tiny, tiny_checkpoint, text, tmp_path):
    write_checkpoint(Tiny(layers=2, vocab=1024), tmp_path / "large")
    refused(evaluate(tiny, "--text", text, "--against", tmp_path / "large"), "vocabular", "1,024", "512")
    other = shutil.copytree(tiny_checkpoint, tmp_path / "same")
    value = json.loads((other / "tokenizer.json").read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(value))
    refused(evaluate(tiny, "--text", text, "--against", other), "vocabular", "other tokens", "tokenizer.json")


def test_a_tokenizer_of_a_larger_model(evaluate, model, tmp_path):
    (tmp_path / "text.txt").write_text("caf\xe9")
    value = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(value.replace('"\xc3": 195', '"\xc3": 999'))  # of the same size
    refused(evaluate(model, "--text", tmp_path / "text.txt"), "the tokenizer is not that of the model", "999", "512")


def test_weights_that_are_no_numbers(evaluate, tiny_checkpoint, tiny, text, tmp_path):
    source = shutil.copytree(tiny_checkpoint, tmp_path / "source")
    edit(source, lambda tensors: tensors["model.language_model.norm.weight"].__setitem__(3, float("nan")))
    refused(evaluate(tiny, "--text", text, "--against", source), "no probabilities", str(source))


def test_a_file_of_results_that_is_none_is_refused_before_the_work(evaluate, model, text):
    (model / EVALUATION_FILE).write_text("{")
    refused(evaluate(model, "--text", text), "not a sound JSON file", EVALUATION_FILE)
    assert (model / EVALUATION_FILE).read_text() == "{"


def test_help_loads_no_torch():
    done = subprocess.run([sys.executable, "-X", "importtime", PROGRAM, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "import time:" in line}
    assert "mosaic.runtime.eval_cli" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "tokenizers", "numpy")}
    for option in ("--demo", "--text", "--against", "--context", "--tokens", "--threads", "--ops", "--kv", "--json"):
        assert re.search(rf"{option}\b.*\w", done.stdout), option
