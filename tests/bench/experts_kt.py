"""kt-kernel's routed experts for tests/bench/experts.py. Started by it with an interpreter that has kt-kernel.

python tests/bench/experts_kt.py EXPERTS TOP_K HIDDEN INNER THREADS TOKENS [VARIANT]

VARIANT is what KT_KERNEL_CPU_VARIANT takes: amx (the default here), avx2, ... Knows nothing of Mosaic, whose
environment is another; speaks as engine_worker says.
"""

import json
import os
import sys
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # kt-kernel talks on standard output

experts, top_k, hidden, inner, threads, longest = (int(word) for word in sys.argv[1:7])
os.environ["KT_KERNEL_CPU_VARIANT"] = sys.argv[7] if len(sys.argv) > 7 else "amx"

import kt_kernel  # noqa: E402, F401  (it makes kt_kernel_ext importable)
import torch  # noqa: E402
from kt_kernel_ext import CPUInfer, WorkerPoolConfig, moe  # noqa: E402

BLOCK = 128


def weights(rows: int, columns: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random E4M3 codes of moderate size, and equal scales."""
    codes, scales = [], []
    for _ in range(experts):
        magnitudes = torch.randint(40, 72, (rows, columns), dtype=torch.uint8)
        codes.append(magnitudes + 128 * torch.randint(0, 2, (rows, columns), dtype=torch.uint8))
        scales.append(torch.full((rows // BLOCK, columns // BLOCK), 2.0**-7))
    return codes, scales


pool = WorkerPoolConfig()
pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
cpu = CPUInfer(pool)
on_gpu = torch.zeros(experts, dtype=torch.bool)
config = moe.MOEConfig(experts, top_k, hidden, inner, on_gpu.data_ptr())
config.layer_idx, config.pool, config.max_len = 0, cpu.backend_, longest
config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 8, BLOCK, False
kept = []
for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
    codes, scales = weights(rows, columns)
    kept += [codes, scales]
    setattr(config, f"{name}_projs", [[part.data_ptr() for part in codes]])
    setattr(config, f"{name}_scales", [[part.data_ptr() for part in scales]])
layer = (moe.AMXFP8_MOE if hasattr(moe, "AMXFP8_MOE") else moe.AVX2FP8_MOE)(config)
numbers = torch.arange(experts)
cpu.submit(layer.load_weights_task(numbers.data_ptr()))
cpu.sync()
del kept


PASSES = 4  # in a row, of which the last one counts


def seconds(tokens: int) -> float:
    """A pass over so many tokens, experts at random; bfloat16 in and out, as kt-kernel wants it."""
    routing = torch.rand(tokens, experts).topk(top_k).indices.to(torch.int64).contiguous()
    shares = torch.full((tokens, top_k), 1 / top_k)
    inputs, outputs = torch.randn(tokens, hidden).bfloat16(), torch.empty(tokens, hidden, dtype=torch.bfloat16)
    count = torch.tensor([tokens], dtype=torch.int32)
    pointers = (part.data_ptr() for part in (routing, shares, inputs, outputs))
    start = time.perf_counter()
    cpu.submit(layer.forward_task(count.data_ptr(), top_k, *pointers, False))
    cpu.sync()
    return time.perf_counter() - start


def last(tokens: int) -> float:
    """Seconds of the last of some passes."""
    return [seconds(tokens) for _ in range(PASSES)][-1]


print("{}", file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": last(json.loads(line)["tokens"])}), file=answers, flush=True)
