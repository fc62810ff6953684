"""The conversion plan: every output byte's place, known from headers before a weight byte is read.

Whatever is wrong with a source's names, shapes, dtypes or configuration is refused here, before anything is written.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mosaic.convert.quantize import NonFinite
from mosaic.convert.recipe import Recipe, ScaleRule, Treatment
from mosaic.format import architectures, e4m3, layout
from mosaic.format.errors import InputError
from mosaic.format.layout import Entry, ShardLayout, Stored
from mosaic.format.match import Source, match
from mosaic.format.source import Checkpoint, check_quantization_config
from mosaic.format.spec import ModelSpec
from mosaic.format.tensors import QUANTIZABLE, Part, Piece, Role, TensorSpec

#: Files that go along unchanged when the source has them.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
)


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor: what is stored, from where, how. `scale` is the source's scale piece of an FP8 source tensor."""

    stored: Stored
    treatment: Treatment
    piece: Piece
    scale: Piece | None
    scale_rule: ScaleRule = ScaleRule.AMAX
    note: str | None = None

    @property
    def passes_through(self) -> bool:
        """FP8 in, the same codes out."""
        return self.scale is not None and self.stored.scale is not None


@dataclass(frozen=True)
class ShardPlan:
    """One output shard and its tensors in contract order."""

    layout: ShardLayout
    tensors: tuple[Planned, ...]

    @property
    def layer(self) -> int | None:
        """The decoder layer it holds; None for what is no layer's: outside, mtp."""
        spec = self.tensors[0].stored.spec
        return spec.layer if spec.part is Part.DECODER else None


@dataclass(frozen=True)
class ConversionPlan:
    """Everything `pipeline` needs; a function of headers, recipe and policy alone."""

    checkpoint: Checkpoint
    recipe: Recipe
    nonfinite: NonFinite
    spec: ModelSpec
    shards: tuple[ShardPlan, ...]
    config: dict[str, Any]
    dropped: tuple[str, ...]
    companions: tuple[Path, ...]

    @property
    def tensors(self) -> Iterable[Planned]:
        """Every planned tensor."""
        return (tensor for shard in self.shards for tensor in shard.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all stored tensors, headers not counted: `metadata.total_size` of the index."""
        return sum(entry.nbytes for shard in self.shards for entry in shard.layout.entries)

    @property
    def index(self) -> dict[str, Any]:
        """The content of model.safetensors.index.json."""
        files = {entry.name: shard.layout.file for shard in self.shards for entry in shard.layout.entries}
        return {"metadata": {"total_size": self.tensor_bytes}, "weight_map": dict(sorted(files.items()))}

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the source: sha256 over config, names, dtypes, shapes, places, sizes, and samples of the weights.

        Two fine-tunes of one model have equal headers. They differ in every tensor or in whole tensors, so 4 KiB from
        the middle of each tell them apart. Not needed for a plan, which reads headers only.
        """
        tensors = sorted(
            (name, info.file.name, info.dtype, info.shape, info.offset)
            for name, info in self.checkpoint.tensors.items()
        )
        sizes = [(file.name, file.stat().st_size) for file in self.checkpoint.files]
        samples = hashlib.sha256()
        for name in sorted({planned.piece.name for planned in self.tensors}):
            samples.update(self.checkpoint.sample(name))
        return _digest([self.checkpoint.config, tensors, sizes, samples.hexdigest()])

    @cached_property
    def digest(self) -> str:
        """Identity of the result: with equal digests, an earlier result is taken for this one."""
        shards = [
            [hashlib.sha256(shard.layout.header).hexdigest(), [planned.piece.name for planned in shard.tensors]]
            for shard in self.shards
        ]
        companions = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in self.companions]
        recipe = [self.recipe.name, self.recipe.digest, self.nonfinite]
        return _digest([self.fingerprint, recipe, self.config, shards, companions, self.checkpoint.unlisted])


def make_plan(checkpoint: Checkpoint, recipe: Recipe, nonfinite: NonFinite = NonFinite.REFUSE) -> ConversionPlan:
    """Plan a conversion; InputError for everything in the source or the recipe that does not hold."""
    config_file = checkpoint.folder / layout.CONFIG_FILE
    architecture = architectures.find(checkpoint.config, config_file)
    spec = architecture.parse(checkpoint.config, config_file)
    check_quantization_config(checkpoint)
    contract = architecture.tensors(spec, checkpoint.config, checkpoint.tensors.keys())
    sources = match(checkpoint, contract)
    treatments = {tensor.key: recipe.treatment(tensor) for tensor in contract}
    kept = [tensor for tensor in contract if treatments[tensor.key] is not Treatment.DROP]
    _check_drops(recipe, contract, kept)
    refusals = _refusals(kept, sources, treatments)
    planned = [
        replace(
            _plan_tensor(checkpoint, tensor, sources[tensor.key], treatments[tensor.key], refusals.get(tensor.key)),
            scale_rule=recipe.scale_rule(tensor),
        )
        for tensor in kept
    ]
    shards = _shards(checkpoint, planned, len(spec.layers))
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    if any(tensor.stored.scale for tensor in planned):
        unquantized = [tensor.stored.spec for tensor in planned if tensor.stored.scale is None]
        config["quantization_config"] = architectures.quantization_config(architecture, unquantized)
    dropped = tuple(tensor.name for tensor in contract if treatments[tensor.key] is Treatment.DROP)
    companions = tuple(file for name in COMPANIONS if (file := checkpoint.folder / name).is_file())
    return ConversionPlan(checkpoint, recipe, nonfinite, spec, shards, config, dropped, companions)


def _plan_tensor(
    checkpoint: Checkpoint,
    tensor: TensorSpec,
    source: Source,
    treatment: Treatment,
    refused: str | None,
) -> Planned:
    """How one tensor is stored; `refused` says why it cannot be E4M3, if so."""
    piece, scale = source
    dtype, note = checkpoint.dtype(piece), None
    if treatment in (Treatment.BF16, Treatment.F32):
        dtype = treatment.name
    elif scale and refused:
        dtype, treatment, note = "BF16", Treatment.BF16, f"dequantised: {refused}"
    elif treatment is Treatment.E4M3 and refused:
        treatment, note = Treatment.KEEP, f"kept: {refused}"
    elif treatment is Treatment.E4M3:
        dtype = "F8_E4M3"
    scales = Entry(tensor.scale_name, "BF16", e4m3.grid(tensor.shape)) if dtype == "F8_E4M3" else None
    stored = Stored(tensor, Entry(tensor.name, dtype, tensor.shape), scales)
    return Planned(stored, treatment, piece, scale, note=note)


def _refusals(
    contract: list[TensorSpec], sources: dict[str, Source], treatments: dict[str, Treatment]
) -> dict[str, str]:
    """Why tensors that would be E4M3 cannot be: by their own role or shape, or for the sake of what engines merge."""

    def would_be(tensor: TensorSpec) -> bool:
        is_fp8 = sources[tensor.key][1] is not None
        return treatments[tensor.key] is Treatment.E4M3 or (treatments[tensor.key] is Treatment.KEEP and is_fp8)

    wanted = {tensor.key: tensor for tensor in contract if would_be(tensor)}
    own: dict[str, str] = {}
    for key, tensor in wanted.items():
        if tensor.role not in QUANTIZABLE:
            own[key] = "engines read this role unquantised only"
        elif not e4m3.whole_blocks(tensor.shape):
            own[key] = f"not a whole number of {e4m3.BLOCK}x{e4m3.BLOCK} blocks"
    mixed = {tensor.fusion for tensor in contract if tensor.key not in wanted or tensor.key in own} - {None}
    merged = {key: "merged by engines with a tensor that is not E4M3" for key in wanted if wanted[key].fusion in mixed}
    return merged | own


def _shards(checkpoint: Checkpoint, tensors: list[Planned], num_layers: int) -> tuple[ShardPlan, ...]:
    """Group by file; where a shard passes scales through that are not bfloat16, all its scales are F32."""
    groups: dict[str, list[Planned]] = defaultdict(list)
    for planned in tensors:
        groups[layout.file_of(planned.stored.spec, num_layers)].append(planned)
    shards = []
    for file, group in groups.items():
        passed = {checkpoint.dtype(planned.scale) for planned in group if planned.scale and planned.passes_through}
        if passed - {"BF16"}:
            group = [replace(planned, stored=_wide_scales(planned.stored)) for planned in group]
        _check_experts(checkpoint, group)
        shards.append(ShardPlan(layout.shard_layout(file, [planned.stored for planned in group]), tuple(group)))
    return tuple(shards)


def _wide_scales(stored: Stored) -> Stored:
    return replace(stored, scale=replace(stored.scale, dtype="F32")) if stored.scale else stored


def _check_experts(checkpoint: Checkpoint, group: list[Planned]) -> None:
    experts = [planned for planned in group if planned.stored.spec.role is Role.ROUTED_EXPERTS]
    if len({planned.stored.weight.dtype for planned in experts}) > 1:
        raise InputError(
            "the experts of one layer would be stored in different dtypes",
            file=checkpoint.folder,
            tensor=experts[0].stored.spec.name,
            found=", ".join(sorted({planned.stored.weight.dtype for planned in experts})),
            expected="one dtype for all experts of a layer: engines load them as one stack",
            remedy="use a recipe that treats routed_experts as e4m3 or bf16",
        )


def _check_drops(recipe: Recipe, contract: list[TensorSpec], kept: list[TensorSpec]) -> None:
    for part in (Part.VISION, Part.MTP):
        whole, rest = (sum(tensor.part is part for tensor in tensors) for tensors in (contract, kept))
        if rest not in (0, whole):
            dropped = next(tensor for tensor in contract if tensor.part is part and tensor not in kept)
            raise InputError(
                f"recipe {recipe.name} drops half a part",
                file=recipe.place(recipe.rule(dropped)),
                found=f"{whole - rest} of {whole} tensors of part {part} dropped",
                expected="all of them or none",
                remedy=f"write `- part: {part}` with `treatment: drop` and no role",
            )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
