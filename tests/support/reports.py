"""Made-up report.json contents, version 2: what a conversion of a hybrid MoE model reports, without converting one.

The numbers hang together as real ones do. Codes, scales and errors of a class in a layer come from quantising noise
whose tails differ by class and layer; single tensors scatter around that.
"""

from dataclasses import dataclass
from math import floor, log2, prod
from typing import Any

import numpy as np

from mosaic.format import e4m3

Entry = dict[str, Any]
#: Student-t degrees of freedom: the fewer, the more outliers.
TAILS = {"routed_experts": 12, "shared_expert": 8, "attention": 6, "linear_attention": 9, "lm_head": 20}
KEPT = {"router": (8, 256), "gate": (1, 256), "norm": (256,)}
MEASURES = ("relative_l2", "sqnr_db", "max_abs_error", "zeroed_share", "signal", "noise")


@dataclass(frozen=True)
class Model:
    """What to make up. `treatment` is that of every matrix that may be E4M3, but for the head."""

    layers: int = 4
    experts: int = 8
    hidden: int = 256
    inter: int = 128
    treatment: str = "e4m3"
    head: str = "keep"
    mtp: bool = False
    mse: bool = False
    exact: bool = False  # every weight is a code times a scale already
    sigma: float = 0.02  # standard deviation of the weights
    sample: int = 2  # squared, the blocks quantised per class and layer
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """What quantising noise of one kind gives, per weight."""

    codes: np.ndarray[Any, Any]  # probability of each magnitude
    scales: dict[str, int]
    scale_min: float
    scale_max: float
    signal: float
    noise: float
    max_abs_error: float


def make_report(model: Model) -> dict[str, Any]:
    """The parsed report.json of a made-up conversion."""
    rng = np.random.default_rng(model.seed)
    entries: list[Entry] = []
    histograms: list[Entry] = []
    for layer in range(model.layers):
        _block(model, rng, "decoder", layer, entries, histograms)
    kept = [("embedding", "outside", "embed_tokens", (1024, model.hidden)), ("norm", "outside", "norm", KEPT["norm"])]
    entries += [_entry(f"model.{name}.weight", role, part, None, shape, "keep") for role, part, name, shape in kept]
    head = [("lm_head.weight", (1024, model.hidden), None)]
    _group(model, rng, ("lm_head", "outside", None, model.head), head, entries, histograms)
    if model.mtp:
        _block(model, rng, "mtp", None, entries, histograms)
    return {
        "version": 2,
        "recipe": "e4m3",
        "dropped": [],
        "unlisted_in_source": [],
        "summary": summarise(entries),
        "histograms": histograms,
        "tensors": entries,
    }


def summarise(entries: list[Entry]) -> list[Entry]:
    """The summary of entries, computed apart from Mosaic's."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry["role"], entry["part"], entry["treatment"]), []).append(entry)
    rows = []
    for key, members in groups.items():
        row: Entry = dict(zip(("role", "part", "treatment"), key, strict=True)) | {"tensors": len(members)}
        sizes = np.array([prod(member["shape"]) for member in members])
        row |= {"weights": int(sizes.sum()), "nbytes": sum(member["nbytes"] for member in members)}
        if "signal" in members[0]:
            signal, noise = (float(np.sum([member[name] for member in members])) for name in ("signal", "noise"))
            row["relative_l2"] = float(np.sqrt(noise / signal)) if signal else 0.0
            row["sqnr_db"] = float(10 * np.log10(signal / noise)) if signal and noise else None
            row["max_abs_error"] = max(member["max_abs_error"] for member in members)
            row["zeroed_share"] = float(np.average([member["zeroed_share"] for member in members], weights=sizes))
            if "amax_noise" in members[0] and noise:
                row["mse_gain_db"] = float(10 * np.log10(sum(member["amax_noise"] for member in members) / noise))
        if "scale_min" in members[0]:
            row["scale_min"] = min(member["scale_min"] for member in members)
            row["scale_max"] = max(member["scale_max"] for member in members)
            shares = [member["subnormal_share"] for member in members]
            row["subnormal_share"] = float(np.average(shares, weights=sizes))
        rows.append(row)
    return rows


def _block(model: Model, rng: Any, part: str, layer: int | None, entries: list[Entry], histograms: list[Entry]) -> None:
    """One decoder layer or the MTP block: every fourth layer, and MTP, has full attention."""
    prefix = "mtp.layers.0." if layer is None else f"model.language_model.layers.{layer}."
    hidden, inter = model.hidden, model.inter
    shapes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    experts = [
        (f"{prefix}mlp.experts.{expert}.{name}.weight", shape, expert)
        for expert in range(model.experts)
        for name, shape in shapes.items()
    ]
    shared = [(f"{prefix}mlp.shared_expert.{name}.weight", shape, None) for name, shape in shapes.items()]
    full = layer is None or layer % 4 == 3
    names = ("self_attn.q_proj", "self_attn.o_proj") if full else ("linear_attn.in_proj_qkv", "linear_attn.out_proj")
    mixer = [(f"{prefix}{name}.weight", (2 * hidden, hidden), None) for name in names]
    for role, group in (
        ("routed_experts", experts),
        ("shared_expert", shared),
        ("attention" if full else "linear_attention", mixer),
    ):
        _group(model, rng, (role, part, layer, model.treatment), group, entries, histograms)
    entries += [_entry(f"{prefix}{role}.weight", role, part, layer, shape, "keep") for role, shape in KEPT.items()]


def _group(
    model: Model,
    rng: Any,
    kind: tuple[str, str, int | None, str],
    tensors: list[tuple[str, tuple[int, ...], int | None]],
    entries: list[Entry],
    histograms: list[Entry],
) -> None:
    """The tensors of one role, part and layer, and their histogram if they are E4M3."""
    role, part, layer, treatment = kind
    made = [_entry(name, role, part, layer, shape, treatment, expert) for name, shape, expert in tensors]
    entries += made
    if treatment == "keep":
        return
    sample = _sample(model, rng, role, layer or 0)
    subnormal = float(sample.codes[1:8].sum())
    for entry in made:
        weights = prod(entry["shape"])
        if treatment == "e4m3":
            size, loss = rng.normal(0.0, (0.06, 0.006))  # decades
            signal = weights * sample.signal * 10**size
            noise = 0.0 if model.exact else weights * sample.noise * 10 ** (size + loss)
            zeroed = 0.0 if model.exact else round(float(sample.codes[0]) * weights) / weights
            decibels = float(10 * np.log10(signal / noise)) if noise else None
            error = 0.0 if model.exact else sample.max_abs_error
            values = (float(np.sqrt(noise / signal)), decibels, error, zeroed, signal, noise)
            entry |= dict(zip(MEASURES, map(_plain, values), strict=True))
            if model.mse:
                entry |= {"scale_rule": "mse", "amax_noise": _plain(noise * (1 + 0.02 * rng.random()))}
        entry |= {"scale_min": sample.scale_min, "scale_max": sample.scale_max, "subnormal_share": subnormal}
    total = sum(prod(entry["shape"]) for entry in made)
    codes = np.rint(sample.codes * total).astype(int).tolist()
    blocks = total // e4m3.BLOCK**2
    scales = {
        exponent: max(1, blocks * count // sum(sample.scales.values())) for exponent, count in sample.scales.items()
    }
    histograms.append({"role": role, "part": part, "layer": layer, "codes": codes, "scales": scales})


def _sample(model: Model, rng: Any, role: str, layer: int) -> Sample:
    """Quantise noise; the last layers have a few weights far out, as real ones do."""
    size = model.sample
    spread = np.exp(rng.normal(0.0, 0.7, (size, size)))
    noise = rng.standard_t(TAILS[role], (size, e4m3.BLOCK, size, e4m3.BLOCK)) * spread[:, None, :, None]
    weights = (noise.reshape(size * e4m3.BLOCK, -1) * model.sigma).astype(np.float32)
    if role == "attention" and layer + 1 == model.layers > 1:
        weights[::64, ::64] *= 12
    codes, scales = e4m3.quantize(weights)
    stored = e4m3.dequantize(codes, scales)
    magnitudes = np.bincount((codes & e4m3.NAN_CODE).ravel(), minlength=e4m3.NAN_CODE + 1)
    values = scales.astype(np.float64)
    exponents: dict[str, int] = {}
    for value in values.ravel():
        exponents[str(floor(log2(value)))] = exponents.get(str(floor(log2(value))), 0) + 1
    difference = (stored - weights).astype(np.float64)
    return Sample(
        magnitudes / codes.size,
        exponents,
        float(values.min()),
        float(values.max()),
        float(np.square(weights, dtype=np.float64).mean()),
        float(np.square(difference).mean()),
        float(np.abs(difference).max()),
    )


def _entry(
    name: str,
    role: str,
    part: str,
    layer: int | None,
    shape: tuple[int, ...],
    treatment: str,
    expert: int | None = None,
) -> Entry:
    dtype = "BF16" if treatment == "keep" else "F8_E4M3"
    blocks = 0 if treatment == "keep" else prod(shape) // e4m3.BLOCK**2
    return {
        "name": name,
        "role": role,
        "part": part,
        "layer": layer,
        "expert": expert,
        "shape": list(shape),
        "dtype": dtype,
        "nbytes": prod(shape) * (2 if treatment == "keep" else 1) + 2 * blocks,
        "treatment": treatment,
    }


def _plain(value: Any) -> Any:
    """Without numpy types: what json.loads gives."""
    return value if value is None else float(value)
