"""The weights of a model directory, mapped and not copied: tensors are views over the shards' pages."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mosaic.format import architectures, e4m3, index, layout
from mosaic.format.catalog import Catalog, read_catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.shard import TensorInfo, read_header, runs
from mosaic.format.spec import ModelSpec
from mosaic.format.tensors import Part, Role, TensorSpec
from mosaic.runtime.machine import free_memory
from mosaic.runtime.mapped_shard import MappedShard
from mosaic.runtime.progress import Progress, silent
from mosaic.runtime.resident import TORCH, FileRows, read_tensors, rows_of, tensor_at

# Views are read-only because their pages are; torch has no word for that and warns once.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass(frozen=True)
class E4M3Matrix:
    """A block-quantised matrix: codes uint8 [N, K], scales bfloat16 or float32 [ceil(N/128), ceil(K/128)]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes read to use it once."""
        return self.codes.nbytes + self.scales.nbytes


Weight = Tensor | E4M3Matrix


@dataclass(frozen=True)
class Expert:
    """The three matrices of one expert."""

    gate: Weight
    up: Weight
    down: Weight

    @property
    def nbytes(self) -> int:
        """Bytes read to use it once."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


class ModelWeights(Protocol):
    """What a model is built from: its tensors by their keys (`mosaic.format.tensors`)."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those of its tensors, sorted, by their safetensors names."""

    def tensor(self, key: str) -> Tensor:
        """An unquantised tensor."""

    def matrix(self, key: str) -> Weight:
        """A matrix, quantised or not."""

    def rows(self, key: str) -> Callable[[Sequence[int]], Tensor]:
        """Rows [T, K] of an unquantised matrix [N, K] by their numbers."""

    def read_ahead(self, prefix: str) -> None:
        """Read all tensors whose keys begin so into memory, as far as there is room."""

    def release(self, prefix: str) -> None:
        """Let go of their memory; used again, they are read again."""


class Weights:
    """The tensors of a model directory by their keys (`mosaic.format.tensors`), each as the contract wants it.

    Views over mapped shards; after `make_resident` those but experts and embedding lie in memory of their own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalog: Catalog = read_catalog(folder)
        self._infos: dict[str, TensorInfo] = {}
        self.shards: dict[str, MappedShard] = {}
        for name, record in self.catalog.files.items():
            file = folder / name
            _check_size(file, record.nbytes)
            if name.endswith(layout.SHARD_SUFFIX):
                self._infos |= read_header(file)
                self.shards[name] = MappedShard(file)
        config_file = folder / layout.CONFIG_FILE
        config = read_json(config_file)
        architecture = architectures.find(config, config_file)
        if architecture.parse(config, config_file) != self.catalog.spec:
            raise self._refused(config_file, None, "another model than the catalog", "the catalog's spec")
        contract = architecture.tensors(self.catalog.spec, config, self._infos.keys())
        self._contract = {tensor.key: tensor for tensor in contract}
        for tensor in contract:
            self._check(tensor)
        self.populated = False
        self._resident: dict[str, Tensor] = {}

    def populate(self, progress: Progress = silent) -> None:
        """Read everything that is mapped, if it fits the free memory."""
        if self.nbytes < free_memory():
            told = progress("reading weights", self.nbytes)
            for shard in self.shards.values():
                shard.populate()
                told(len(shard.buffer))
            self.populated = True

    def _check(self, tensor: TensorSpec) -> None:
        """A tensor of the contract is there, in its shape, and has scales exactly if it is E4M3."""
        info, scale = self._infos.get(tensor.name), self._infos.get(tensor.scale_name)
        if info is None:
            raise self._refused(self.folder, tensor.name, "no such tensor", "every tensor of the model")
        if info.shape != tensor.shape or info.dtype not in TORCH:
            raise self._refused(info.file, tensor.name, f"{info.dtype} {list(info.shape)}", f"{list(tensor.shape)}")
        grid = e4m3.grid(tensor.shape) if info.dtype == "F8_E4M3" else None
        if (scale.shape if scale else None) != grid or (scale and scale.dtype not in ("BF16", "F32")):
            found = f"{info.dtype} with scales {scale and (scale.dtype, scale.shape)}"
            raise self._refused(info.file, tensor.name, found, f"scales {grid} in BF16 or F32 for E4M3, else none")

    @staticmethod
    def _refused(file: Path, tensor: str | None, found: str, expected: str) -> InputError:
        return InputError(
            "the model directory does not hold together",
            file=file,
            tensor=tensor,
            found=found,
            expected=expected,
            remedy="mosaic-verify tells more; copy the directory or convert the checkpoint again",
        )

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.catalog.spec

    @property
    def dtypes(self) -> tuple[str, ...]:
        """See ModelWeights."""
        return tuple(sorted({info.dtype for info in self._infos.values()}))

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(record.nbytes for name, record in self.catalog.files.items() if name in self.shards)

    def tensor(self, key: str) -> Tensor:
        """An unquantised tensor."""
        return self._view(self._contract[key].name)

    def rows(self, key: str) -> Callable[[Sequence[int]], Tensor]:
        """See ModelWeights."""
        name = self._contract[key].name
        if self._resident and name not in self._resident:
            return FileRows(self._infos[name])
        table = self._view(name)
        return partial(rows_of, table)

    def matrix(self, key: str) -> Weight:
        """A matrix, quantised or not."""
        spec = self._contract[key]
        if spec.scale_name in self._infos:
            return E4M3Matrix(self._view(spec.name), self._view(spec.scale_name))
        return self._view(spec.name)

    def read_ahead(self, prefix: str) -> None:
        """See ModelWeights."""
        for file, first, end in self._runs(prefix):
            self.shards[file.name].populate(first, end)

    def release(self, prefix: str) -> None:
        """See ModelWeights."""
        for file, first, end in self._runs(prefix):
            self.shards[file.name].release(first, end)

    def _runs(self, prefix: str) -> Iterator[tuple[Path, int, int]]:
        specs = [spec for key, spec in self._contract.items() if key.startswith(prefix)]
        names = [name for spec in specs for name in (spec.name, spec.scale_name)]
        return runs(self._infos[name] for name in names if name in self._infos)

    def expert_place(self, layer: int, expert: int) -> tuple[bytes | int, ...]:
        """What the expert index should say of one expert, by the shard headers (see `format.index.ROW`)."""
        specs = [self._contract[f"layers.{layer}.moe.experts.{expert}.{name}"] for name in ("gate", "up", "down")]
        parts = [self._infos[spec.name] for spec in specs]
        scales = [self._infos[spec.scale_name].span for spec in specs if spec.scale_name in self._infos]
        return index.place(parts[0].file.name, [part.span for part in parts], scales)

    def dense(self, first: int = 0, *, head: bool = True) -> dict[str, TensorInfo]:
        """What every token needs, by name: not routed experts, nor an embedding that is no head.

        Only of the decoder layers from `first` on; of what is outside of them only if `head`.
        """
        wanted = (spec for layer, spec in self._dense() if (head if layer is None else layer >= first))
        return {name: self._infos[name] for spec in wanted for name in self._names(spec)}

    def dense_nbytes(self) -> Counter[int | None]:
        """Bytes of the same by decoder layer; None: outside of them."""
        nbytes = Counter[int | None]()
        for layer, spec in self._dense():
            nbytes[layer] += sum(self._infos[name].nbytes for name in self._names(spec))
        return nbytes

    def _dense(self) -> Iterator[tuple[int | None, TensorSpec]]:
        """With the decoder layer, or None."""
        for spec in self._contract.values():
            looked_up = spec.role is Role.EMBEDDING and not self.catalog.spec.tie_embeddings
            if spec.expert is None and spec.part in (Part.DECODER, Part.OUTSIDE) and not looked_up:
                yield spec.layer if spec.part is Part.DECODER else None, spec

    def _names(self, spec: TensorSpec) -> list[str]:
        """Of a tensor of the contract, and of its scales if it has any."""
        return [name for name in (spec.name, spec.scale_name) if name in self._infos]

    def make_resident(self, progress: Progress = silent, first: int = 0, *, head: bool = True) -> None:
        """Copy `dense` into memory of its own.

        For models that do not fit: the reading of experts would push mapped pages out. Before tensors are asked for.
        """
        dense = self.dense(first, head=head)
        self._resident = {}  # of an earlier time: both would be too much
        told = progress("reading dense weights", sum(info.nbytes for info in dense.values()))
        self._resident = read_tensors(dense, told)

    def release_dense(self, layers: int, *, head: bool) -> None:
        """Let go of what `dense` has of the first so many layers, and of what is outside of them if `head`."""
        kept = self.dense(layers, head=not head)
        for file, first, end in runs(info for name, info in self.dense().items() if name not in kept):
            self.shards[file.name].release(first, end)

    def _view(self, name: str) -> Tensor:
        if name in self._resident:
            return self._resident[name]
        info = self._infos[name]
        return tensor_at(self.shards[info.file.name].buffer, info.dtype, info.shape, info.offset)


def _check_size(file: Path, expected: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found != expected:
        raise InputError(
            "a file of the model directory is not what the catalog says",
            file=file,
            found="nothing" if found is None else f"{found:,} bytes",
            expected=f"{expected:,} bytes",
            remedy="copy the model directory again, or convert the checkpoint again; mosaic-verify checks every byte",
        )
