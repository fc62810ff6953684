"""`mosaic-verify --for`: what should load passes for every engine, and each rule has a mutation that it alone finds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mosaic.convert.engine_files import Engine
from mosaic.convert.engine_parallel import sizes
from mosaic.convert.engines import check_for
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.convert.verify_cli import app
from mosaic.format import architectures
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint
from mosaic.format.tensors import Role
from support import oracle
from support.configs import MOE_30B, NEXT_80B
from support.faults import edit, edit_config, edit_index, file_of
from support.fp8 import dequantise, quantise, write_official_fp8
from support.listing import Entry, load_listing, write_sparse_checkpoint
from support.models import convert_folder
from support.shards import INDEX
from support.tiny import Tiny, write_checkpoint, write_tokenizer

VLLM, SGLANG, TRANSFORMERS = Engine
SERVED, ALL = {VLLM, SGLANG}, set(Engine)
NOTHING: dict[Engine, set[str]] = {engine: set() for engine in Engine}
SMALL = {"layers": 2, "interval": 2, "experts": 4, "top_k": 2}
FAMILIES = {
    "3.6": Tiny(**SMALL),
    "3.5": Tiny(variant="3.5", **SMALL),
    "text": Tiny(mtp=False, visual=False, **SMALL),
    "tied": Tiny(tie=True, **SMALL),
    "next": Tiny(family="qwen3_next", **SMALL),
    "moe": Tiny(family="qwen3_moe", **SMALL),
    "dense-layer": Tiny(family="qwen3_moe", mlp_only_layers=(1,), **SMALL),
    "narrow-keys": Tiny(linear_key_heads=2, **SMALL),  # 64 query rows, merged with others
    "ragged": Tiny(moe_inter=192, **SMALL),
}
TEXT = "model.language_model."
LAYER = f"{TEXT}layers.1."  # full attention
QUERY, KEY = f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.k_proj.weight"
EXPERTS = f"{LAYER}mlp.experts"
EXPERT = f"{EXPERTS}.2.up_proj.weight"
GATE = f"{TEXT}layers.0.linear_attn.in_proj_a"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of a family's BF16 source, of the official FP8 release of it, or of our output; made once."""
    root = tmp_path_factory.mktemp("made")

    def make(name: str, kind: str = "out", recipe: str = "e4m3") -> Path:
        source, folder = root / name / "bf16", root / name / f"{kind}-{recipe}"
        if not source.exists():
            write_checkpoint(FAMILIES[name], source)
            write_tokenizer(source, FAMILIES[name].vocab)
            for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
                (source / file).write_text("{}")
        if kind == "bf16":
            return source
        if not folder.exists():
            write_official_fp8(source, folder) if kind == "official" else convert_folder(source, folder, recipe)
        return folder

    return make


@pytest.fixture
def model(made, tmp_path):
    """A sound output of one's own."""
    return Path(shutil.copytree(made("3.6"), tmp_path / "model"))


def findings(folder, engine):
    return {finding.invariant: finding for finding in check_for(engine, folder)}


def failed(folder):
    """{engine: the rules that fail}, and nothing is left unchecked."""
    result = {}
    for engine in Engine:
        found = findings(folder, engine)
        assert all(finding.checked for finding in found.values())
        result[engine] = {name for name, finding in found.items() if not finding.holds}
        assert all(finding.failures and finding.remedies for name, finding in found.items() if name in result[engine])
    return result


def only(rule, engines):
    return {engine: {rule} if engine in engines else set() for engine in Engine}


def notes(folder, engine, rule):
    return " ".join(findings(folder, engine)[rule].notes)


def skip_list(folder, change):
    edit_config(folder, lambda config: change(config["quantization_config"]["modules_to_not_convert"]))


# --------------------------------------------------------------------------------------------------- what should pass


@pytest.mark.parametrize("name", ["3.6", "3.5", "text", "tied", "next", "moe", "dense-layer"])
@pytest.mark.parametrize("kind", ["bf16", "official", "out"])
def test_what_should_load_passes(made, name, kind):
    assert failed(made(name, kind)) == NOTHING


def test_experts_only_passes(made):
    assert failed(made("3.6", recipe="experts-only")) == NOTHING


def test_rules_of_each_engine(model):
    ids = {engine: list(findings(model, engine)) for engine in Engine}
    every = [f"L{number}" for number in range(1, 15)]
    assert ids[SGLANG] == every
    assert ids[VLLM] == [name for name in every if name != "L9"]
    assert ids[TRANSFORMERS] == [name for name in every if name not in ("L8", "L9", "L12", "L13")]


# ---------------------------------------------------------------------------------------- one mutation, one rule, each


def change_quantization(key, value):
    return lambda folder: edit_config(folder, lambda config: config["quantization_config"].update({key: value}))


def without_quantization(folder):
    edit_config(folder, lambda config: config.pop("quantization_config"))


def other_class(folder):
    edit_config(folder, lambda config: config.update(architectures=["Qwen3MoeForCausalLM"]))


def flat_names(folder):
    edit(folder, lambda tensors: {name.replace(TEXT, "model."): tensor for name, tensor in tensors.items()})
    skip_list(folder, lambda entries: entries.__setitem__(slice(None), [e.replace(TEXT, "model.") for e in entries]))


def unlisted(folder):
    edit_index(folder, lambda weight_map: weight_map.pop(QUERY))


def without_total(folder):
    value = json.loads((folder / INDEX).read_text())
    del value["metadata"]["total_size"]
    (folder / INDEX).write_text(json.dumps(value))


def stacked(folder):
    """E4M3 experts of one layer as one tensor, scales likewise."""

    def change(tensors):
        for suffix in ("", "_scale_inv"):
            parts = {
                kind: [tensors.pop(f"{EXPERTS}.{e}.{kind}_proj.weight{suffix}") for e in range(SMALL["experts"])]
                for kind in ("gate", "up", "down")
            }
            pairs = zip(parts["gate"], parts["up"], strict=True)
            both = [torch.cat([gate.view(torch.int8), up.view(torch.int8)]) for gate, up in pairs]
            down = [matrix.view(torch.int8) for matrix in parts["down"]]
            kind = parts["gate"][0].dtype
            tensors[f"{EXPERTS}.gate_up_proj{suffix}"] = torch.stack(both).view(kind)
            tensors[f"{EXPERTS}.down_proj{suffix}"] = torch.stack(down).view(kind)

    edit(folder, change)


def without(name):
    return lambda folder: edit(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name})


def dequantised(name, *listed):
    """One E4M3 tensor as BF16, and listed as such."""

    def mutate(folder):
        def change(tensors):
            tensors[name] = dequantise(tensors[name], tensors.pop(f"{name}_scale_inv")).bfloat16()

        edit(folder, change)
        skip_list(folder, lambda entries: entries.extend(listed))

    return mutate


def quantised(name):
    def change(tensors):
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensors[name])

    return lambda folder: edit(folder, change)


def listed(*entries):
    return lambda folder: skip_list(folder, lambda skip: skip.extend(entries))


def not_listed(entry):
    return lambda folder: skip_list(folder, lambda skip: skip.remove(entry))


def replaced(name, function):
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: function(tensors[name])}))


def added(name, tensor):
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensor}))


def set_text(key, value):
    return lambda folder: edit_config(folder, lambda config: config["text_config"].update({key: value}))


def absent(*files):
    return lambda folder: [(folder / file).unlink() for file in files]


MUTATIONS = {
    "no quantization_config": (without_quantization, "L1", ALL),
    "static activations": (change_quantization("activation_scheme", "static"), "L1", ALL),
    "no activation_scheme": (change_quantization("activation_scheme", None), "L1", ALL),
    "other blocks": (change_quantization("weight_block_size", [64, 128]), "L1", ALL),
    "other method": (change_quantization("quant_method", "compressed-tensors"), "L1", ALL),
    "other format": (change_quantization("fmt", "e5m2"), "L1", ALL),
    "other class": (other_class, "L2", SERVED),
    "flat names": (flat_names, "L2", SERVED),
    "unlisted tensor": (unlisted, "L3", ALL),
    "no total_size": (without_total, "L3", ALL),
    "stacked E4M3 experts": (stacked, "L4", ALL),
    "expert without scales": (without(f"{EXPERT}_scale_inv"), "L4", ALL),
    "key not quantised": (dequantised(KEY, KEY.removesuffix(".weight")), "L5", SERVED),
    "one expert not quantised": (dequantised(EXPERT), "L5", ALL),
    "router quantised": (quantised(f"{LAYER}mlp.gate.weight"), "L7", ALL),
    "embedding quantised": (quantised(f"{TEXT}embed_tokens.weight"), "L7", ALL),
    "decay projection quantised": (quantised(f"{GATE}.weight"), "L7", ALL),
    "vision quantised": (quantised("model.visual.blocks.0.attn.qkv.weight"), "L7", ALL),
    "entry for one expert": (listed(f"{EXPERTS}.3"), "L8", SERVED),
    "entry for one matrix": (listed(EXPERT.removesuffix(".weight")), "L8", SERVED),
    "norm absent": (without(f"{LAYER}input_layernorm.weight"), "L10", ALL),
    "vision tensor absent": (without("model.visual.pos_embed.weight"), "L10", ALL),
    "unknown tensor": (added(f"{LAYER}mlp.bias", torch.zeros(4)), "L10", ALL),
    "other shape": (replaced(f"{TEXT}norm.weight", lambda norm: norm[:-1]), "L10", ALL),
    "other dtype": (replaced(f"{TEXT}norm.weight", lambda norm: norm.to(torch.int16)), "L10", ALL),
    "scales in F16": (replaced(f"{QUERY}_scale_inv", lambda scale: scale.half()), "L11", ALL),
    "scales of another grid": (replaced(f"{QUERY}_scale_inv", lambda scale: scale[:1]), "L11", ALL),
    "query without scales": (without(f"{QUERY}_scale_inv"), "L11", ALL),
    "scales of BF16": (added(f"{GATE}.weight_scale_inv", torch.ones(1, 2)), "L11", ALL),
    "half an MTP block": (without("mtp.norm.weight"), "L12", SERVED),
    "two MTP layers": (set_text("mtp_num_hidden_layers", 2), "L12", SERVED),
    "MTP denied": (set_text("mtp_num_hidden_layers", 0), "L12", SERVED),
    "no tokenizer": (absent("tokenizer.json"), "L13", SERVED),
    "no tokenizer_config": (absent("tokenizer_config.json"), "L13", SERVED),
    "no preprocessor": (absent("preprocessor_config.json"), "L13", SERVED),
    "gate not listed": (not_listed(GATE), "L14", ALL),
    "vision not listed": (not_listed("model.visual.merger.linear_fc1"), "L14", ALL),
    "MTP projection not listed": (not_listed("mtp.fc"), "L14", SERVED),
    "head not listed": (not_listed("lm_head"), "L14", {TRANSFORMERS}),
    "shared gate not listed": (not_listed(f"{LAYER}mlp.shared_expert_gate"), "L14", {TRANSFORMERS}),
    "E4M3 listed": (listed(f"{LAYER}self_attn.o_proj"), "L14", ALL),
    "whole layer listed": (listed(LAYER.removesuffix(".")), "L14", {SGLANG, TRANSFORMERS}),
    "the stack listed": (listed(EXPERTS), None, ALL),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_rule_has_a_mutation_of_its_own(model, mutation):
    mutate, rule, engines = MUTATIONS[mutation]
    mutate(model)
    expected = only(rule, engines) if rule else {VLLM: {"L8"}, SGLANG: {"L8"}, TRANSFORMERS: {"L14"}}
    assert failed(model) == expected


def test_mutations_cover_every_rule():
    rules = {rule for _, rule, _ in MUTATIONS.values()}
    # L6: needs other sizes; L9: never fails
    assert rules >= {f"L{number}" for number in range(1, 15)} - {"L6", "L9"}


def test_experts_twice(made, tmp_path):
    folder = Path(shutil.copytree(made("3.6", "bf16"), tmp_path / "model"))
    added(EXPERT, torch.zeros(128, 256, dtype=torch.bfloat16))(folder)
    assert failed(folder) == only("L10", ALL)


def test_quantization_without_e4m3(made, tmp_path):
    folder = Path(shutil.copytree(made("3.6", "bf16"), tmp_path / "model"))
    config = json.loads((made("3.6") / "config.json").read_text())
    edit_config(folder, lambda own: own.update(quantization_config=config["quantization_config"]))
    assert failed(folder) == only("L1", ALL)


def test_the_skip_list_by_its_other_name(model):
    edit_config(model, lambda config: config["quantization_config"].update(
        ignored_layers=config["quantization_config"].pop("modules_to_not_convert")))  # fmt: skip
    assert failed(model) == NOTHING


def test_a_prefix_covers_what_is_below_it_but_not_in_vllm(model):
    def change(entries):
        entries[:] = [*(entry for entry in entries if ".visual." not in entry), "model.visual"]

    skip_list(model, change)
    assert failed(model) == only("L14", {VLLM})


def test_head_in_e4m3_fails_everywhere(made):
    folder = made("3.6", recipe="e4m3-head")
    assert failed(folder) == only("L7", ALL)
    for engine in Engine:
        finding = findings(folder, engine)["L7"]
        assert "lm_head.weight" in finding.failures[0]
        assert "recipe e4m3" in finding.remedies[0]


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_unreadable_shards_leave_the_rest_unchecked(model, damage):
    file = file_of(model, QUERY)
    file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[:-1])
    for engine in Engine:
        found = findings(model, engine)
        assert file.name in found["L3"].failures[0]
        assert found["L3"].remedies
        assert not any(finding.checked for name, finding in found.items() if name != "L3")


def test_at_most_five_failures_with_names(model):
    edit(model, lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)})
    finding = findings(model, VLLM)["L10"]
    assert len(finding.failures) == 5
    assert all(LAYER in failure for failure in finding.failures)


# --------------------------------------------------------------------------------------- blocks, parallelism and notes


def test_ragged_e4m3_fails_everywhere(made):
    assert failed(made("ragged", "official")) == only("L6", ALL)
    assert failed(made("ragged")) == NOTHING  # we keep ragged matrices in BF16


def test_members_of_merged_linears_are_whole_blocks_too(made):
    folder = made("narrow-keys")
    assert failed(folder) == only("L6", SERVED)
    assert "64 rows" in findings(folder, VLLM)["L6"].failures[0]


def test_tensor_parallel_is_told(made):
    assert notes(made("3.6"), VLLM, "L6") == "tensor parallel 1"
    assert notes(made("3.6", "bf16"), SGLANG, "L6") == "tensor parallel 1, 2, 4"
    assert not findings(made("3.6"), TRANSFORMERS)["L6"].notes


@pytest.mark.parametrize(
    ("config", "plain", "experts"),
    [(NEXT_80B, [1, 2, 4], [1, 2, 4]), (MOE_30B, [1, 2], [1, 2, 4, 8, 16, 32])],
    ids=["80B", "30B"],
)
def test_tensor_parallel_of_the_published_models(config, plain, experts, tmp_path):
    """The 30B in FP8 starts at 1 and 2 and not at 4 (vLLM issues 17569 and 25292)."""
    spec = architectures.find(config, tmp_path).parse(config, tmp_path)
    fp8 = {Role.ROUTED_EXPERTS, Role.SHARED_EXPERT, Role.ATTENTION, Role.LINEAR_ATTENTION}
    assert sizes(spec, fp8) == plain
    assert sizes(spec, fp8, expert_parallel=True) == experts
    assert sizes(spec, set()) > plain


def test_substring_trap_of_old_sglang_is_a_note(made, tmp_path):
    folder = Path(shutil.copytree(made("dense-layer"), tmp_path / "model"))
    assert not notes(folder, SGLANG, "L9")
    listed("model.layers.1.mlp.gate")(folder)
    assert failed(folder) == NOTHING
    assert "model.layers.1.mlp.gate_proj" in notes(folder, SGLANG, "L9")


def test_text_only_class(made, tmp_path):
    folder = Path(shutil.copytree(made("text"), tmp_path / "model"))
    flat_names(folder)

    def change(config):
        text, quantization = config["text_config"], config["quantization_config"]
        config.clear()
        config.update(text | {"architectures": ["Qwen3_5MoeForCausalLM"], "quantization_config": quantization})

    edit_config(folder, change)
    assert failed(folder) == only("L2", {SGLANG})
    assert "recent" in notes(folder, VLLM, "L2")


def test_notes_break_nothing(model):
    edit(model, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(("mtp.", "model.visual."))})
    shutil.copy(model / "layers-00.safetensors", model / "again.safetensors")
    absent("generation_config.json")(model)
    listed("re:.*gate$")(model)
    value = json.loads((model / INDEX).read_text())
    value["metadata"]["total_size"] += 1
    (model / INDEX).write_text(json.dumps(value))
    assert failed(model) == NOTHING
    assert "no block" in notes(model, VLLM, "L12")
    assert "--language-model-only" in notes(model, VLLM, "L10")
    assert "again.safetensors" in notes(model, SGLANG, "L3")
    assert "total_size" in notes(model, SGLANG, "L3")
    assert "generation_config.json" in notes(model, SGLANG, "L13")
    assert "re:.*gate$" in notes(model, TRANSFORMERS, "L14")


@pytest.mark.parametrize(
    "mutation",
    ["no quantization_config", "stacked E4M3 experts", "norm absent", "flat names", "key not quantised", "other class"],
)
def test_transformers_agrees(model, mutation):
    """Loaded here: it places every key exactly if the rules hold."""
    MUTATIONS[mutation][0](model)
    if failed(model)[TRANSFORMERS]:
        with pytest.raises(AssertionError, match="could not place every key"):
            oracle.load(model)
    else:
        oracle.load(model)


# -------------------------------------------------------------------------------------------------------- the program


def test_program_tells_and_exits(model):
    good = CliRunner().invoke(app, [str(model), "--for", "vllm"])
    assert good.exit_code == 0, good.output
    assert "L6   ok" in good.output
    assert "note: tensor parallel 1" in good.output
    without_quantization(model)
    bad = CliRunner().invoke(app, [str(model), "--for", "sglang"])
    assert bad.exit_code == 1
    assert "L1   FAILED" in bad.output
    assert "remedy: convert" in bad.output
    file_of(model, QUERY).unlink()
    assert "L1   not checked" in CliRunner().invoke(app, [str(model), "--for", "sglang"]).output


def test_json_has_the_results(model):
    other_class(model)
    result = CliRunner().invoke(app, [str(model), "--for", "vllm", "--json"])
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert value["sound"] is False
    found = {entry["invariant"]: entry for entry in value["invariants"]}
    assert {"title", "failures", "checked", "remedies", "notes"} <= found["L2"].keys()
    assert [name for name, entry in found.items() if entry["failures"]] == ["L2"]


def test_not_a_checkpoint_exits_with_2(tmp_path, model):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    program = Path(sys.executable).with_name("mosaic-verify")
    for folder in ("absent", "empty", "file"):
        done = subprocess.run([program, tmp_path / folder, "--for", "vllm"], capture_output=True, text=True)
        assert done.returncode == 2
        assert "remedy" in done.stderr
    edit_config(model, lambda config: config.update(model_type="llama"))
    with pytest.raises(InputError, match="not supported"):
        check_for(VLLM, model)
    assert CliRunner().invoke(app, [str(model), "--for", "ollama"]).exit_code == 2


def test_headers_only_and_quick_for_the_real_35b(tmp_path):
    """64,196 tensors in 37 GB of holes: headers, config and index are read, no weight."""
    config, files, total = load_listing()
    write_sparse_checkpoint(tmp_path / "bf16", config, files, total)
    with Checkpoint(tmp_path / "bf16") as source:
        plan = make_plan(source, load_recipe("e4m3"))
        shards = {
            shard.layout.file: [Entry(e.name, e.dtype, e.shape) for e in shard.layout.entries] for shard in plan.shards
        }
        write_sparse_checkpoint(tmp_path / "out", plan.config, shards, plan.tensor_bytes)
    before = read_bytes()
    found = findings(tmp_path / "out", VLLM)
    assert read_bytes() - before < 25_000_000  # 8 MB of headers, 6 MB of index
    assert [name for name, finding in found.items() if not finding.holds] == ["L13"]  # no tokenizer in the listing
    assert found["L6"].notes == ["tensor parallel 1, 2, 4"]


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
