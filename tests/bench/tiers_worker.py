"""One run within a budget of memory, for tests/bench/tiers.py: prints a JSON object of what it took.

python tests/bench/tiers_worker.py MODEL RAM THREADS WARM-UP TOKENS PROMPT [TRACE] [--prefetch]

RAM is in bytes, or 0 for what is free. Reads a prompt of PROMPT tokens twice, the second time counted, which also fills
the slots; decodes WARM-UP tokens uncounted, then TOKENS. With TRACE its routing is used instead of the model's.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from bench.replayed import ReplayedOps
from mosaic.runtime import machine
from mosaic.runtime.bench import random_tokens
from mosaic.runtime.experts.trace import read_trace
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import CpuOps, set_threads
from mosaic.runtime.prefill import PREFILL_CHUNK

CONTEXT = 2048  # tokens that memory is planned for


def main() -> None:
    """Run it."""
    prefetch = "--prefetch" in sys.argv
    folder, ram, threads, warm_up, count, prompt, *trace = [part for part in sys.argv[1:] if part != "--prefetch"]
    set_threads(int(threads))
    start = time.perf_counter()
    loading = Loading(Path(folder), KVFormat.BF16, context=CONTEXT, ram=int(ram) or None)
    ops: Ops = CpuOps()
    if trace:
        ops = ReplayedOps(ops, read_trace(Path(trace[0])))
    loaded = loading.load(ops, LoadOptions(prefetch=prefetch))
    loaded_seconds = time.perf_counter() - start
    model = loaded.model
    tokens = random_tokens(model.spec.vocab_size, max(int(warm_up) + int(count), int(prompt)))
    for _ in range(2):
        state, traffic, start = model.new_sequence(), loaded.experts.traffic, time.perf_counter()
        for first in range(0, int(prompt), PREFILL_CHUNK):
            model.hidden(tokens[first : min(first + PREFILL_CHUNK, int(prompt))], state)
        prefill, prefilled = time.perf_counter() - start, loaded.experts.traffic.since(traffic)
        del state
    state = model.new_sequence()
    for token in tokens[: int(warm_up)]:
        model.logits(model.hidden([token], state))
    traffic, faults, start = loaded.experts.traffic, machine.major_faults(), time.perf_counter()
    for token in tokens[int(warm_up) : int(warm_up) + int(count)]:
        model.logits(model.hidden([token], state))
    decode, decoded = time.perf_counter() - start, loaded.experts.traffic.since(traffic)
    faults = machine.major_faults() - faults
    print(
        json.dumps(
            {
                "budget": loading.plan.budget,
                "plan": loading.plan.total,
                "slots": loading.plan.slots,
                "experts": loading.plan.num_experts,
                "peak_rss": machine.peak_rss(),
                "load_seconds": loaded_seconds,
                "decode_tok_s": int(count) / decode,
                "decode": asdict(decoded) | {"seconds": decode},
                "major_faults": faults,
                "prefill_tok_s": int(prompt) / prefill if int(prompt) else 0.0,
                "prefill": asdict(prefilled) | {"seconds": prefill},
            }
        )
    )


if __name__ == "__main__":
    main()
