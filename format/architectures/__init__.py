"""The model families, one file each, named by model_type: the only place that knows Hugging Face tensor names."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from mosaic.format.architectures import qwen3_5_moe, qwen3_moe, qwen3_next
from mosaic.format.e4m3 import BLOCK
from mosaic.format.errors import InputError
from mosaic.format.spec import ModelSpec
from mosaic.format.tensors import TensorSpec


class Architecture(Protocol):
    """What an architecture file offers."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:  # noqa: N802 - a constant of the module
        """The top-level model_type values of the family."""

    @property
    def HF_CLASSES(self) -> dict[str, str]:  # noqa: N802 - a constant of the module
        """{model_type: what `architectures` of config.json says}; engines choose their model class by it."""

    def parse(self, config: dict[str, Any], file: Path) -> ModelSpec:
        """The spec of a config.json; InputError for what Mosaic cannot run faithfully."""

    def tensors(self, spec: ModelSpec, config: dict[str, Any], names: Collection[str]) -> list[TensorSpec]:
        """The tensors a checkpoint must consist of, in output order, given the names it lists.

        The names decide between equally legal layouts and whether the optional parts (vision, MTP) are there.
        """

    def skip_list(self, unquantized: list[TensorSpec]) -> list[str]:
        """`modules_to_not_convert` for the tensors that are not stored as E4M3."""


_FAMILIES: tuple[Architecture, ...] = (qwen3_5_moe, qwen3_next, qwen3_moe)


def find(config: dict[str, Any], file: Path) -> Architecture:
    """The architecture of a config.json by its top-level model_type."""
    for family in _FAMILIES:
        if config.get("model_type") in family.MODEL_TYPES:
            return family
    known = ", ".join(name for family in _FAMILIES for name in family.MODEL_TYPES)
    raise InputError(
        "this model family is not supported",
        file=file,
        found=f"model_type {config.get('model_type')!r}",
        expected=known,
        remedy="convert a checkpoint of one of these families; Mosaic runs no other",
    )


def quantization_config(architecture: Architecture, unquantized: list[TensorSpec]) -> dict[str, Any]:
    """What config.json says of a directory in which all but the given tensors are E4M3."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": architecture.skip_list(unquantized),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
