#!/usr/bin/env bash
# What to run on a machine with an NVIDIA card, in this repository: some minutes, less than eight.
#
#     tests/device/check.sh [--quick] [--parts NAMES] [--layers N] [--build] [--rehearse]
#
# Parts:    kernels   the tests of every kernel, on the card
#           engine    the demo converted and run: CPU alone beside the card, tokens and probabilities
#           rates     copies and kernels at the 35B's sizes, beside what memory and arithmetic allow
#           speed     tokens per second of a model of the 35B's shape, with room for more and more experts
# --quick   only kernels and engine; --parts kernels,rates: only these.
# --layers  of the model for `speed`, 8 unless said: 0.84 GB each, in TMPDIR while it runs, and RAM for it.
# --build   the native code, even if this checkout is installed already.
# --rehearse  without a card: everything in tiny, the host in the card's place. Its figures mean nothing.
#
# Ends with one table; exit code 0: all is right, 1: something is not, 2: no card, wrong arguments, or something is missing.
# With OUT in the environment, a folder that is made if need be, there is $OUT/check.json, too, from the beginning and
# newer after every part; Ctrl-C ends the check with 130 and a table of what there is. Python is $PYTHON or python3.
# Where this checkout is not installed, the native code is built into build/device; that takes torch, triton, numpy,
# ml_dtypes, jinja2, tokenizers, typer, tqdm, pyyaml, safetensors, hypothesis, pytest (xdist: faster),
# scikit-build-core, pybind11, cmake, ninja or make, and gcc, but no package index.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
build_limit=90
build=
for argument in "$@"; do
    case $argument in
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        --build) build=--build ;;
        --rehearse) build_limit=600 ;;
    esac
done

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $python is no Python of 3.11 or later that runs here; PYTHON says which one to take" >&2
    exit 2
fi
is_installed='import sys, mosaic._native, mosaic.format.index as m; sys.exit(not m.__file__.startswith(sys.argv[1]))'
[ "$build" ] || "$python" -P -c "$is_installed" "$root/" 2>/dev/null || build=--build
"$python" "$root/tests/device/needs.py" "$@" $build

if [ "$build" ]; then
    site=$root/build/device/site
    echo "building the native code: at most $build_limit seconds" >&2
    rm -rf "$site"
    timeout "$build_limit" "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
        --no-build-isolation --target "$site" --config-settings build-dir="$root/build/device/cmake" "$root" >&2 &
    trap "kill $!; exit 130" INT TERM
    wait $! || { echo "the native code was not built" >&2; exit 1; }
    trap - INT TERM
    export PYTHONPATH=$site:$root/tests/device/start${PYTHONPATH:+:$PYTHONPATH}
fi
exec "$python" "$root/tests/device/check.py" "$@"
