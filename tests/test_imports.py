"""The import law of docs/DESIGN.md section 2, enforced on the source, and what programs load."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("format", "convert", "runtime")
RECIPES = ("recipes/__init__.py",)
SOURCES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for path in (*(file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))), ROOT / RECIPES[0])
}
NATIVE_USERS = {
    *(f"runtime/{name}.py" for name in ("machine", "mapped_shard", "ops/cpu", "experts/arena")),
    "convert/quantize.py",
}
DECISIONS = {
    "runtime/tuning.py",
    *(
        f"runtime/experts/{name}.py"
        for name in ("slots", "tracker", "placement", "promotion", "trace", "replay", "profile")
    ),
}
PLANS = {
    f"runtime/{name}.py" for name in ("footprint", "plan", "plan_vram", "plans", "ram_items", "vram_items", "wishes")
}
#: Pieces of Hugging Face tensor names. `_scale_inv` has one more owner, the contract.
TENSOR_NAMES = re.compile(
    r"self_attn|linear_attn|[qkvo]_proj|in_proj|out_proj|embed_tokens|lm_head\.|layernorm|gate_up|gate_proj|up_proj|"
    r"down_proj|mlp\.(gate|experts|shared)|shared_expert_gate|language_model\.|model\.layers|model\.visual|pre_fc|"
    r"conv1d|A_log|[qk]_norm\."
)


def imports(tree: ast.Module) -> set[str]:
    """Every imported module, and every `module.name` of a from-import."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def users(module: str) -> set[str]:
    return {
        file
        for file, tree in SOURCES.items()
        if any(name == module or name.startswith(f"{module}.") for name in imports(tree))
    }


def strings(tree: ast.Module) -> list[str]:
    """String constants that are not docstrings."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
    return [node.value for node in nodes if isinstance(node.value, str)]


def test_the_walk_sees_the_sources():
    assert len(SOURCES) > 30
    assert "format/e4m3.py" in users("numpy")
    assert "runtime/model.py" in users("torch")


def test_imports_are_absolute():
    """A relative import would slip through the walk."""
    for file, tree in SOURCES.items():
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level], file


def test_packages_do_not_reach_across():
    assert not {file for file in users("mosaic.runtime") if not file.startswith("runtime/")}
    assert not {file for file in users("mosaic.convert") if not file.startswith("convert/")}
    assert users("mosaic.recipes") >= {"runtime/options.py", "convert/recipe.py"}
    assert users("prompt_toolkit") == {"runtime/terminal/editor.py"}


def test_torch_stays_in_the_runtime():
    assert not {file for file in users("torch") if not file.startswith("runtime/")}
    assert set(SOURCES) >= DECISIONS | PLANS
    assert not users("torch") & (DECISIONS | PLANS)
    assert not {file for file in users("torch") if file.startswith("runtime/text/")}
    assert not {file for file in users("torch.cuda") | users("triton") if not file.startswith("runtime/ops/cuda/")}
    assert users("triton")
    assert not users("transformers")
    assert not users("safetensors")


def test_the_simulator_loads_no_torch():
    """It runs where nothing is to be computed."""
    check = "import sys, mosaic.runtime.bench_simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_native_has_three_users():
    assert users("mosaic._native") <= NATIVE_USERS
    assert users("mosaic._native")


def test_grammars_have_one_user():
    assert users("llguidance") == {"runtime/grammar.py"}


def test_the_server_and_its_libraries_stay_together():
    for library in ("starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client"):
        found = users(library)
        assert found, library
        assert not {file for file in found if not file.startswith("runtime/serve/")}
    assert not {file for file in users("mosaic.runtime.serve") if not file.startswith("runtime/serve/")}
    assert users("llguidance") == {"runtime/grammar.py"}


def test_tensor_names_live_in_architectures():
    for file, tree in SOURCES.items():
        if not file.startswith("format/architectures/"):
            assert not [text for text in strings(tree) if TENSOR_NAMES.search(text)], file
    architecture = SOURCES["format/architectures/qwen.py"]
    assert sum(bool(TENSOR_NAMES.search(text)) for text in strings(architecture)) > 10  # the pattern does find them


@pytest.mark.parametrize(
    ("number", "owner"), [(128, "format/e4m3.py"), (448.0, "format/e4m3.py"), (4096, "format/layout.py")]
)
def test_constants_of_the_format_have_one_owner(number, owner):
    holders = {
        file
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == number
    }
    assert holders == {owner}


@pytest.mark.parametrize("module", ["mosaic.format.architectures", "mosaic.convert.cli", "mosaic.convert.verify_cli"])
def test_converter_loads_no_torch(module):
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize(
    "program", ["mosaic-convert", "mosaic-verify", "mosaic-run", "mosaic-serve", "mosaic-bench", "mosaic-eval"]
)
def test_help_is_quick_and_loads_no_torch(program):
    # torch alone takes more than a second to import here, so time is the symptom and the module list the proof.
    script = Path(sys.executable).with_name(program)
    times = []
    for _ in range(3):
        start = time.monotonic()
        shown = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=True)
        times.append(time.monotonic() - start)
        assert "Usage" in shown.stdout
    assert min(times) < 1.0
    trace = subprocess.run([sys.executable, "-X", "importtime", str(script), "--help"], capture_output=True, text=True)
    assert "| typer" in trace.stderr
    assert not re.search(r"\|\s+torch$", trace.stderr, re.M)
