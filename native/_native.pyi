"""Types of the C++ extension, for mypy and editors. The behaviour is defined in native/src, not here."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

# Below Python 3.12 numpy does not declare its arrays as Buffer; there mypy also checks their dtype.
_Codes = NDArray[np.uint8] | Buffer
_Values = NDArray[np.float32] | Buffer
_Bits = NDArray[np.uint16] | Buffer
_Counts = NDArray[np.uint64] | Buffer
_Numbers = NDArray[np.int64] | Buffer

def isas() -> tuple[str, ...]:
    """The instruction sets compiled in and supported by this CPU, slowest first."""

def isa() -> str:
    """The active instruction set: the fastest supported one, or the one that MOSAIC_ISA names."""

def e4m3_decode(codes: _Codes, out: _Values, isa: str = "") -> None:
    """Decode E4M3 codes (uint8) into float32, exactly; 0x7F and 0xFF become NaN."""

def e4m3_encode(values: _Values, out: _Codes, isa: str = "") -> None:
    """Encode float32 into E4M3 codes (uint8): nearest, ties to even, saturating; NaN becomes 0x7F or 0xFF."""

def e4m3_count(codes: _Codes, counts: _Counts, isa: str = "") -> None:
    """Add to counts (128 times uint64) how often each magnitude of E4M3 codes (uint8), the sign off, occurs."""

def e4m3_quantize(
    weights: _Values | _Bits,
    codes: _Codes,
    scales: _Bits,
    counts: _Counts,
    exponents: _Counts,
    limit: float,
    candidates: int = 1,
    step: int = 1,
    isa: str = "",
) -> tuple[float, float, float, int, float, float, float] | None:
    """Quantise weights [N, K]: float32, or bfloat16 as uint16; whole 128x128 blocks.

    Codes are uint8, scales bfloat16 as uint16: by rule amax, or the least noise of `candidates` scales from that of
    rule amax upwards, `step` bfloat16 values apart. Adds to `counts` (128 times uint64) how often each magnitude
    occurs, and to `exponents` (256 times uint64) how often each biased exponent of a scale does. Returns (sum of
    squares, sum of squared errors, largest error, weights that became 0, sum of squared errors by rule amax, least
    scale, largest scale), or None if a magnitude is above `limit` or not a number: what was written then means
    nothing, and nothing is added.
    """

def guard_mapping(mapping: _Codes, message: str) -> None:
    """From now on a SIGBUS within these bytes prints the message on standard error and ends the process with code 2.

    So it ends when a mapped file became shorter. Other SIGBUS do what they did before.
    """

def release_mapping(mapping: _Codes) -> None:
    """The mapping is about to go."""

def threads() -> int:
    """How many threads kernels run on."""

def set_threads(count: int) -> None:
    """Set how many threads kernels run on, at least 1."""

def rms_norm(x: _Values, weight: _Values, out: _Values, eps: float, offset: float, isa: str = "") -> None:
    """X / rms(x) * (offset + weight) over rows as long as weight. Rows of x may have gaps; out may be x."""

def add_rms_norm(
    x: _Values, y: _Values, weight: _Values, total: _Values, out: _Values, eps: float, offset: float, isa: str = ""
) -> None:
    """Total = x + y, and out its rms_norm."""

def gated_rms_norm(x: _Values, weight: _Values, gate: _Values, out: _Values, eps: float, isa: str = "") -> None:
    """X / rms(x) * weight * silu(gate) over rows as long as weight. out may be x or gate."""

def causal_conv(x: _Values, history: _Values, weight: _Values, out: _Values, isa: str = "") -> None:
    """Silu of the depthwise causal convolution of x [T, C] with weight [C, taps]; 2 to 8 taps.

    Rows of x may have gaps. Advances history [taps - 1, C] in place.
    """

def delta_gates(
    a: _Values, b: _Values, a_log: _Values, dt_bias: _Values, log_decay: _Values, beta: _Values, isa: str = ""
) -> None:
    """Write log_decay = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b), all [T, value heads]."""

def delta_rule(
    query: _Values,
    key: _Values,
    value: _Values,
    log_decay: _Values,
    beta: _Values,
    state: _Values,
    out: _Values,
    isa: str = "",
) -> None:
    """The gated delta rule, token by token; query and key are normalised and query is scaled here.

    query, key [T, key heads, d_k] and value [T, value heads, d_v], whose rows may have gaps; log_decay, beta [T, value
    heads]; out [T, value heads, d_v]. Advances state [value heads, d_k, d_v] in place.
    """

def gated_delta(
    qkv: _Values,
    z: _Values,
    b: _Values,
    a: _Values,
    conv: _Values,
    a_log: _Values,
    dt_bias: _Values,
    norm: _Values,
    history: _Values,
    state: _Values,
    out: _Values,
    eps: float,
    isa: str = "",
) -> None:
    """causal_conv, delta_gates, delta_rule and gated_rms_norm in one, to the same bits.

    qkv [T, C] with the queries, keys and values of a token side by side; z and out [T, value heads * d_v]; a, b [T,
    value heads]; conv [C, taps]. Advances history [taps - 1, C] and state [value heads, d_k, d_v] in place.
    """

def rotate(x: _Values, positions: _Numbers, out: _Values, rotary_dim: int, theta: float, isa: str = "") -> None:
    """Rotary embedding of the first rotary_dim dims of x [T, h, d], halves paired. out may be x."""

def sigmoid_gate(x: _Values, gate: _Values, out: _Values, isa: str = "") -> None:
    """X * sigmoid(gate), with as many gates as x (rows may have gaps) or one for each row. out may be x."""

def silu_multiply(a: _Values, b: _Values, out: _Values, isa: str = "") -> None:
    """Silu(a) * b. out may be a or b."""

def attention(
    query: _Values,
    pages: _Numbers,
    scales: _Numbers | None,
    out: _Values,
    seen: int,
    kv_heads: int,
    kv: str,
    isa: str = "",
) -> None:
    """Causal attention of query [T, heads, d], the last T of `seen` tokens.

    Pages [2 (key, value), 64, kv_heads, d] hold f32, bf16 or e4m3, as `kv` says; `pages` are their addresses. For e4m3
    `scales` are the addresses of float32 [2, 64, kv_heads], else None. What lies at an address is not checked.
    """

def read_bandwidth(buffer: _Codes, seconds: float, isa: str = "") -> float:
    """Bytes per second at which all threads read a buffer (uint8, much larger than the caches) once through.

    The median of the passes in so many seconds.
    """

def multiply_add_peak(seconds: float, isa: str = "") -> float:
    """Float32 operations per second of multiply-adds in registers on all threads; a multiply-add is two."""

def bf16_dot_peak(seconds: float, isa: str = "") -> float:
    """The same of dot products of bfloat16 pairs; 0 if the instruction set has none."""

class Reader:
    """Reads spans of files into memory in the background, by `depth` threads that block or sleep.

    A large span is read in parts by several of them. Any thread may call any method; a fork has to make its own.
    Tickets that are not known (any more) and a closed reader are a ValueError.
    """

    def __init__(self, depth: int) -> None:
        """RuntimeError if the machine does not give so many threads."""

    def submit(self, descriptor: int, offset: int, out: _Codes, speculative: bool = False) -> int:
        """Queue a read that fills `out` (uint8) from `offset` on; a ticket, larger than all before.

        A speculative read begins only when no other waits. The descriptor must stay open and `out` be left alone until
        the read is collected or cancelled; the reader keeps `out` alive. A descriptor with O_DIRECT is read straight
        into `out` in whole pages; what is not that is copied, and a file system that refuses is read plainly.
        """

    def wait(self, tickets: Sequence[int]) -> list[int]:
        """Those of the tickets that are done, at least one, in order of completion; they are forgotten.

        OSError (EIO where the file ends before) for the first that failed, and only that one is forgotten. Ctrl-C
        forgets none.
        """

    def done(self, tickets: Sequence[int]) -> list[int]:
        """The same without waiting: there may be none."""

    def need(self, ticket: int) -> None:
        """Move what has not begun of a speculative read to the needed ones."""

    def cancel(self, ticket: int) -> bool:
        """Forget a read that has not begun, whose memory is then never written; False if it has: collect it."""

    def close(self) -> None:
        """Forget all reads, end the threads; returns when no memory is written any more."""

    @property
    def pending(self) -> int:
        """Reads that are not done."""

    @property
    def idle(self) -> int:
        """Threads that nothing running or waiting will occupy."""

    @property
    def nbytes(self) -> int:
        """Bytes read since the start."""

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start in which at least one thread was reading."""

class Matrix:
    """A weight [N, K] where it lies, read only: E4M3 codes (uint8) with scales, bfloat16 (as uint16), or float32.

    Scales are [ceil(N/128), ceil(K/128)] in bfloat16 (as uint16) or float32. Keeps its buffers alive.
    """

    def __init__(self, values: Buffer | NDArray[Any], scales: Buffer | NDArray[Any] | None = None) -> None: ...
    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

class Expert:
    """down(silu(gate(x)) * up(x)) of gate and up [I, H] and down [H, I]. Keeps them alive."""

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix) -> None: ...

def linear(matrices: Sequence[Matrix], x: _Values, y: Sequence[_Values], bf16: bool = False, isa: str = "") -> None:
    """For each of the matrices, its y [.., N] = x [.., K] times it transposed, float32.

    x is of one sequence, [T, K], or of several, [B, T, K]: each gets the bits that it has alone.
    `bf16`: round x to bfloat16 where the weights are E4M3 and the CPU has instructions for that.
    """

def mix_experts(
    experts: Sequence[Expert],
    slots: NDArray[np.int32] | Buffer,
    weights: _Values,
    x: _Values,
    y: _Values,
    bf16: bool = False,
    isa: str = "",
) -> None:
    """Y [.., H] = the sum over ranks r, in order, of weights[.., r] * experts[slots[.., r]](x[..]).

    x [T, H] or [B, T, H] as in `linear`.
    """

def apply_experts(
    experts: Sequence[Expert],
    slots: NDArray[np.int32] | Buffer,
    x: _Values,
    outputs: _Values,
    bf16: bool = False,
    isa: str = "",
) -> None:
    """Outputs [.., R, H] = experts[slots[.., r]](x[..]); where a slot is -1 nothing is written. x as in `linear`."""

def add_outputs(outputs: _Values, weights: _Values, y: _Values) -> None:
    """Y [.., H] = the sum over ranks r, in order, of weights[.., r] * outputs[.., r]."""

def route(
    logits: _Values, shared: _Values | None, normalize: bool, experts: NDArray[np.int64] | Buffer, weights: _Values
) -> None:
    """The largest of logits [.., E] into experts and weights [.., top_k], best first, of equals the lower number first.

    The weights are the softmax over the chosen if `normalize`, else over all. With shared [.., 1] the last column is
    expert E and sigmoid(shared).
    """
