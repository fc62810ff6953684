"""The weights of a checkpoint as it was downloaded, mapped and not copied: what a conversion is judged against.

Fused experts are rows of their stack. Official FP8 is used as it is. Not for speed: experts are found by name, and
lie where the release has them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mosaic.format import architectures, e4m3
from mosaic.format.layout import CONFIG_FILE
from mosaic.format.match import match
from mosaic.format.shard import runs
from mosaic.format.source import Checkpoint, check_quantization_config, locate
from mosaic.format.spec import ModelSpec
from mosaic.format.tensors import Piece
from mosaic.runtime.experts.store import PresentExperts
from mosaic.runtime.mapped_shard import MappedShard
from mosaic.runtime.resident import rows_of, tensor_at
from mosaic.runtime.weights import E4M3Matrix, Expert, Weight


class SourceWeights(PresentExperts):
    """Implements `ModelWeights` and `ExpertStore` for a checkpoint directory.

    InputError for one that mosaic-convert would refuse by its headers.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with Checkpoint(folder) as checkpoint:
            check_quantization_config(checkpoint)
            config_file = folder / CONFIG_FILE
            architecture = architectures.find(checkpoint.config, config_file)
            self._spec = architecture.parse(checkpoint.config, config_file)
            contract = architecture.tensors(self._spec, checkpoint.config, checkpoint.tensors.keys())
            self._sources = match(checkpoint, contract)
            self._infos = checkpoint.tensors
            self._shards = {file: MappedShard(file) for file in checkpoint.files}
        self._experts: dict[int, dict[int, Expert]] = {}  # by layer; of those that were asked for

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._spec

    @property
    def dtypes(self) -> tuple[str, ...]:
        """See ModelWeights."""
        return tuple(sorted({info.dtype for info in self._infos.values()}))

    def tensor(self, key: str) -> Tensor:
        """See ModelWeights. Dequantised if the release has it in FP8 all the same."""
        weight = self.matrix(key)
        if isinstance(weight, E4M3Matrix):
            return torch.from_numpy(e4m3.dequantize(weight.codes.numpy(), weight.scales.float().numpy()))
        return weight

    def matrix(self, key: str) -> Weight:
        """See ModelWeights."""
        piece, scale = self._sources[key]
        if scale is None:
            return self._view(piece)
        scales = self._view(scale)
        return E4M3Matrix(self._view(piece), scales.float() if scales.dtype is torch.float16 else scales)

    def rows(self, key: str) -> Callable[[Sequence[int]], Tensor]:
        """See ModelWeights."""
        return partial(rows_of, self.tensor(key))

    def expert(self, layer: int, expert: int) -> Expert:
        """See PresentExperts."""
        known = self._experts.setdefault(layer, {})
        if expert not in known:
            key = f"layers.{layer}.moe.experts.{expert}"
            known[expert] = Expert(*(self.matrix(f"{key}.{name}") for name in ("gate", "up", "down")))
        return known[expert]

    def read_ahead(self, prefix: str) -> None:
        """See ModelWeights."""
        for file, first, end in self._runs(prefix):
            self._shards[file].populate(first, end)

    def release(self, prefix: str) -> None:
        """See ModelWeights."""
        for file, first, end in self._runs(prefix):
            self._shards[file].release(first, end)

    def _runs(self, prefix: str) -> Iterator[tuple[Path, int, int]]:
        sources = [source for key, source in self._sources.items() if key.startswith(prefix)]
        names = {piece.name for source in sources for piece in source if piece}
        return runs(self._infos[name] for name in names)

    def _view(self, piece: Piece) -> Tensor:
        info = self._infos[piece.name]
        offset, shape = locate(info, piece)
        view = tensor_at(self._shards[info.file].buffer, info.dtype, shape, offset)
        return view.clone() if offset % view.element_size() else view  # kernels want whole elements
