"""What mosaic-run refuses, and in which words: before it takes time, and with exit code 2."""

import os
import shutil

import pytest

from mosaic.recipes import DEMO_CHECKPOINT
from support.mosaic_run import PROMPT, assert_refused, run


def test_an_unconverted_checkpoint_is_refused_with_the_remedy():
    assert_refused(run(DEMO_CHECKPOINT, PROMPT), "not a Mosaic model directory", "mosaic-convert", str(DEMO_CHECKPOINT))


def test_a_missing_directory_is_refused(refused, tmp_path):
    refused(tmp_path / "none", PROMPT, words=("no such model directory", "check the path"))


def test_any_other_directory_is_refused(refused, tmp_path):
    refused(tmp_path, PROMPT, words=("not a Mosaic model directory", "no mosaic.json", "mosaic-convert"))


def test_a_file_for_a_directory_is_refused(refused, demo):
    refused(demo / "config.json", PROMPT, words=("no such model directory", "a file"))


def test_an_unfinished_conversion_is_refused(refused, tmp_path):
    (tmp_path / ".mosaic-convert").mkdir()
    refused(tmp_path, PROMPT, words=("unfinished conversion", "mosaic-convert"))


def test_a_truncated_shard_is_refused(refused, tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    shard = model / "layers-02.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refused(model, PROMPT, words=("layers-02.safetensors", "remedy"))


def test_a_missing_shard_is_refused(refused, tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "outside.safetensors").unlink()
    refused(model, PROMPT, words=("outside.safetensors", "nothing", "remedy"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("layer", ("experts.npy", "remedy")),
        ("shard", ("experts.npy",)),
        ("offset", ("experts.npy",)),
    ],
)
def test_an_expert_index_that_lies_is_refused(refused, tiny, tmp_path, damage, words):
    """Of the right size, as the catalog demands, but with other contents."""
    import numpy as np

    model = shutil.copytree(tiny, tmp_path / "model")
    rows = np.load(model / "experts.npy")
    rows[damage][0] = {"shard": b"none.safetensors", "offset": 2**62, "layer": 99}[damage]
    np.save(model / "experts.npy", rows)
    refused(model, PROMPT, "--temperature", 0, "--max-tokens", 1, words=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv", "int8"), ("--kv", "int8", "f32, bf16, e4m3")),
        (("--temperature", "-1"), ("--temperature", "-1")),
        (("--temperature", "nan"), ("--temperature", "nan")),
        (("--temperature", "hot"), ("--temperature",)),
        (("--top-p", "0"), ("--top-p is out of range",)),
        (("--min-p", "2"), ("--min-p is out of range",)),
        (("--repetition-penalty", "0"), ("--repetition-penalty is out of range",)),
        (("--presence-penalty", "1e3"), ("--presence-penalty is out of range",)),
        (("--frequency-penalty", "nan"), ("--frequency-penalty is out of range",)),
        (("--logit-bias", "11"), ("--logit-bias is not usable", "11")),
        (("--logit-bias", "999999=1"), ("999999",)),
        (("--stop", ""), ("stop string is empty",)),
        (("--session", "/none/such"), ("--session cannot be written", "no such folder")),
        (("--top-k", "-2"), ("--top-k", "-2")),
        (("--context", "0"), ("--context",)),
        (("--context", "99999"), ("--context", "99999", "4,096")),
        (("--context", "3"), ("does not fit the context",)),
        (("--max-tokens", "0"), ("--max-tokens",)),
        (("--seed", "-1"), ("--seed",)),
        (("--threads", "0"), ("--threads",)),
        (("--no-such-option",), ("--no-such-option",)),
        (("--ram", "much"), ("--ram is no size", "much", "8GiB")),
        (("--ram", "8"), ("--ram is no size", "write 8GiB")),
        (("--state-budget", "8"), ("--state-budget is no size", "write 8GiB")),
        (("--ram", "10MiB"), ("the memory does not suffice", "10.00 MiB", "at least", "--ram")),
        (("--stats", "loud"), ("--stats", "loud", "text, json, live")),
        (("--warm", "none.json"), ("none.json",)),
        (("--record-routing", "."), ("cannot write a trace", "directory")),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(refused, tiny, options, words):
    refused(tiny, "a prompt", *options, words=words)


def test_a_trace_of_something_else_is_not_written_to(refused, tiny, tmp_path):
    file = tmp_path / "precious"
    file.write_text("not a trace")
    refused(tiny, "a prompt", "--record-routing", file, words=("not a routing trace", "precious"))
    assert file.read_text() == "not a trace"


@pytest.mark.parametrize("arguments", [(), ("--demo", "one", "two"), ("--raw",)], ids=str)
def test_unclear_commands_are_refused(refused, arguments):
    refused(*arguments, words=("what to run is not clear", "mosaic-run"))


@pytest.mark.parametrize("options", [("-", "--raw"), ("--raw",)], ids=str)
def test_empty_standard_input_is_refused_raw(refused, tiny, options):
    refused(tiny, *options, words=("prompt is empty",))


@pytest.mark.parametrize("given", ["", "\n"], ids=repr)
def test_empty_standard_input_is_refused(refused, tiny, given):
    """The template makes a prompt of nothing too; it is nothing all the same."""
    refused(tiny, "-", "--max-tokens", 1, given=given.encode(), words=("prompt is empty",))


def test_a_prompt_that_is_not_utf8_is_refused(refused, tiny):
    """Python hands over an argument like $'\\xff' with a lone surrogate in it."""
    refused(tiny, "a\udcff", words=("UTF-8",))


def test_a_prompt_in_a_pipe_that_is_not_utf8_is_refused(refused, tiny, tmp_path):
    file = tmp_path / "latin"
    file.write_bytes(b"caf\xe9")
    refused(tiny, "-", words=("not UTF-8", "standard input"), given=b"caf\xe9")
    refused(tiny, "-f", file, words=("not UTF-8", str(file)))
    refused(tiny, "-f", tmp_path / "none", words=("cannot read the prompt", "none"))


@pytest.mark.parametrize(
    "option", [("--system", "x"), ("--think",), ("--hide-thinking",), ("--session", "file")], ids=str
)
def test_what_plain_text_has_no_use_for_is_refused(refused, tiny, option):
    refused(tiny, "x", "--raw", *option, words=("means nothing with --raw", option[0].removeprefix("--hide-")))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--temperature", 1),
        ("-f", "x"),
        ("--warm", "x"),
        ("--prefetch",),
        ("--json",),
        ("--ops", "reference"),
        ("hello",),
    ],
    ids=str,
)
def test_what_a_plan_does_not_depend_on_is_refused(refused, tiny, arguments):
    shown = {"-f": "--file", "hello": "PROMPT"}.get(arguments[0], arguments[0])
    refused(tiny, "--plan", *arguments, words=(f"{shown} means nothing with --plan",))


@pytest.mark.parametrize("mode", [(PROMPT,), ("--plan",)], ids=str)
def test_a_device_that_cannot_be_meant_is_refused(refused, tiny, mode):
    refused(tiny, *mode, "--device", "tpu", words=("no such --device", "tpu", "cuda:N"))
    refused(tiny, *mode, "--device", "cpu", "--vram", "3GiB", words=("--vram means nothing with --device cpu",))
    refused(tiny, *mode, "--device", "cpu", "--gpu-layers", 3, words=("--gpu-layers means nothing with --device cpu",))
    refused(tiny, *mode, "--vram", "3", words=("--vram is no size", "write 3GiB"))


def test_a_plan_with_a_prompt_for_the_demo(refused):
    refused("--plan", "--demo", "hello", words=("what to run is not clear", "--plan with a prompt"))
