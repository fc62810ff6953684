"""A checkpoint directory as a serving engine sees it: config, index and shard headers, no weights. Judges nothing.

Any directory of a known family: Mosaic's output, an official release, someone else's, in FP8 or BF16.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from mosaic.format import architectures
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import CONFIG_FILE, SHARD_SUFFIX
from mosaic.format.shard import TensorInfo, read_header
from mosaic.format.source import Checkpoint
from mosaic.format.tensors import Part, Piece, Role, TensorSpec, scale_name

FP8 = "F8_E4M3"


class Engine(StrEnum):
    """An engine whose loading rules are known."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of the contract and how the directory stores it."""

    spec: TensorSpec
    piece: Piece
    info: TensorInfo
    scale: TensorInfo | None

    @property
    def quantized(self) -> bool:
        """Stored as E4M3."""
        return self.info.dtype == FP8

    @property
    def stacked(self) -> bool:
        """One matrix of a tensor that holds several."""
        return self.piece.index is not None

    @property
    def module(self) -> str:
        """What skip lists call it: the module's path; for a routed expert, that of all experts of its layer."""
        name = self.spec.pieces[-1].name
        if self.spec.expert is not None:
            return name.rpartition(f".{self.spec.expert}.")[0]
        return name.removesuffix(".weight")


class EngineFiles:
    """The directory. InputError if it is not a checkpoint of a known family at all.

    `damage` says why the shards cannot be read as the index lists them, if so; then no tensor is known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        self.unlisted: list[str] = []  # tensors that stand in listed shards nevertheless: engines load them
        self.stray: list[str] = []  # shards that are not listed: engines do not
        self.damage: InputError | None = None
        try:
            self._read(Checkpoint(folder))
        except InputError as error:
            if not (folder / CONFIG_FILE).is_file() or not any(folder.glob(f"*{SHARD_SUFFIX}")):
                raise
            self.damage = error
        self.config = read_json(folder / CONFIG_FILE)
        self.architecture = architectures.find(self.config, folder / CONFIG_FILE)
        self.spec = self.architecture.parse(self.config, folder / CONFIG_FILE)
        self.contract = self.architecture.tensors(self.spec, self.config, self.tensors.keys())

    def _read(self, checkpoint: Checkpoint) -> None:
        self.tensors = dict(checkpoint.tensors)
        self.stray = [name for name in checkpoint.unlisted if (self.folder / name).is_file()]
        if len(self.stray) < len(checkpoint.unlisted):
            for file in checkpoint.files:
                for name, info in read_header(file).items():
                    if self.tensors.setdefault(name, info).file != file or name not in checkpoint.tensors:
                        self.unlisted.append(f"{name} ({file.name})")

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config`; empty if there is none that is an object."""
        value = self.config.get("quantization_config")
        return value if isinstance(value, dict) else {}

    @cached_property
    def skip_list(self) -> list[str]:
        """The modules that config.json says are not quantised."""
        value = self.quantization.get("ignored_layers") or self.quantization.get("modules_to_not_convert") or []
        return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []

    @cached_property
    def found(self) -> list[Found]:
        """What is there of the contract, in its order."""
        result = []
        for spec in self.contract:
            if piece := next((piece for piece in spec.pieces if piece.name in self.tensors), None):
                info, scale = self.tensors[piece.name], self.tensors.get(scale_name(piece.name))
                result.append(Found(spec, piece, info, scale))
        return result

    @cached_property
    def missing(self) -> list[TensorSpec]:
        """What is not there of the contract."""
        there = {found.spec.key for found in self.found}
        return [spec for spec in self.contract if spec.key not in there]

    @cached_property
    def unknown(self) -> list[str]:
        """Tensors the contract does not have under any name."""
        weights = {piece.name for spec in self.contract for piece in spec.pieces}
        known = weights | {scale_name(name) for name in weights}
        return [name for name in self.tensors if name not in known]

    @cached_property
    def quantized_roles(self) -> set[Role]:
        """The roles of which any tensor is E4M3."""
        return {found.spec.role for found in self.found if found.quantized}

    def has(self, part: Part) -> bool:
        """Whether any tensor of a part is there."""
        return any(found.spec.part is part for found in self.found)
