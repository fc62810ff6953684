"""The weights of a model directory, mapped and not copied: tensors are views over the shards' pages."""

import contextlib
import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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
from mosaic.format.tensors import TensorSpec
from mosaic.runtime.machine import free_memory

# Views are read-only because their pages are; torch has no word for that and warns once.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

MADV_POPULATE_READ = 22  # of Linux; the mmap module has no name for it
TORCH = {"F8_E4M3": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


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

    def read_ahead(self, prefix: str) -> None:
        """Read all tensors whose keys begin so into memory, as far as there is room."""

    def release(self, prefix: str) -> None:
        """Let go of their memory; used again, they are read again."""


class ExpertStore(Protocol):
    """Where the matrices of routed experts come from."""

    def expert(self, layer: int, expert: int) -> Expert:
        """The matrices of one expert."""


class MappedShard:
    """One shard in the address space, read-only. Pages are read when touched."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def populate(self, first: int = 0, end: int | None = None) -> None:
        """Read all pages now, or those of some bytes.

        One that a kernel touches first stops it for longer than its bytes take.
        In huge pages where the file system has them, since small ones cost a third of the memory's speed; what is
        cached in small ones stays so.
        """
        for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_READ):
            self._advise(advice, first, end)

    def release(self, first: int, end: int) -> None:
        """Map the pages of some bytes no longer, until they are used again; the system may then forget them."""
        self._advise(mmap.MADV_DONTNEED, first, end)

    def _advise(self, advice: int, first: int, end: int | None) -> None:
        first -= first % mmap.PAGESIZE
        with contextlib.suppress(OSError):  # Linux without huge pages, or before 5.14
            self._map.madvise(advice, first, (len(self._map) if end is None else end) - first)

    def view(self, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
        """A tensor over the bytes at `offset`. Nothing may write to it."""
        count = torch.Size(shape).numel()
        return torch.frombuffer(self._map, dtype=TORCH[dtype], count=count, offset=offset).view(shape)


class Weights:
    """The tensors of a model directory by their keys (`mosaic.format.tensors`), each as the contract wants it.

    What fits the free memory is read at once.
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
        if self.nbytes < free_memory():
            for shard in self.shards.values():
                shard.populate()

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

    def _view(self, name: str) -> Tensor:
        info = self._infos[name]
        return self.shards[info.file.name].view(info.dtype, info.shape, info.offset)


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
