"""The engine `mosaic` for tests/bench/engine.py, and the machine's ceilings. Started by it; see engine_worker.

python tests/bench/engine_mosaic.py MODEL ACTIVATIONS THREADS, or: python tests/bench/engine_mosaic.py THREADS
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench

from bench.engine_worker import serve
from mosaic.runtime import machine
from mosaic.runtime.bench import SHORT_PROMPT, begun, decode_seconds, prefill_seconds, random_tokens
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.choice import Activations, OpsName, make_ops
from mosaic.runtime.weights import Weights


def serve_model(folder: Path, activations: str, threads: int) -> None:
    """Decode and prefill of one model."""
    weights = Weights(folder)
    weights.populate()
    model = HybridModel(weights, make_ops(OpsName.CPU, Activations(activations), threads))

    def tokens(count: int) -> list[int]:
        return random_tokens(model.spec.vocab_size, count)

    def decode(count: float) -> dict[str, float]:
        given = tokens(SHORT_PROMPT + int(count))
        return {"seconds": decode_seconds(model, begun(model, given), given[SHORT_PROMPT:])}

    serve(
        {
            "decode": decode,
            "prefill": lambda count: {"seconds": prefill_seconds(model, tokens(int(count)))},
            "bytes": lambda _: {"per_token": model.nbytes_per_token},
        }
    )


def serve_ceilings(threads: int) -> None:
    """What the machine can do: bytes and operations per second."""
    serve(
        {
            "ceilings": lambda seconds: {
                "read": machine.read_ceiling(seconds, threads),
                "multiply_add": machine.multiply_add_peak(seconds, threads),
                "bf16_dot": machine.bf16_dot_peak(seconds, threads),
            }
        }
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve_ceilings(int(sys.argv[1]))
    else:
        serve_model(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
