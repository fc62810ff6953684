"""How serving engines look modules up in the skip list of quantization_config. Facts about their sources, not ours.

vLLM compares whole names. SGLang and transformers also take an entry for everything below it; SGLang wherever it stands
between dots, transformers at the start or as any ending. For a stack of experts vLLM and SGLang take every entry that
contains the word and the stack's name, so that one expert's entry switches all of them.
"""

from collections.abc import Collection

from mosaic.convert.engine_files import Engine, EngineFiles, Found
from mosaic.format.tensors import QUANTIZABLE, Part, Role

EXPERTS = "experts"
MODEL = "model."  # SGLang tries every entry with and without it


class SkipList:
    """The entries as one engine reads them."""

    def __init__(self, engine: Engine, entries: list[str]) -> None:
        self._engine = engine
        self._entries = entries
        bare = [entry.removeprefix(MODEL) for entry in entries] if engine is Engine.SGLANG else []
        self._names = frozenset(entries) | {*bare, *(MODEL + entry for entry in bare)}

    def covers(self, module: str) -> bool:
        """Whether the engine builds a module unquantised; not by way of `stack_entries`."""
        return not self._names.isdisjoint(self._spellings(module))

    def stack_entries(self, module: str) -> list[str]:
        """The entries that switch a whole stack of experts, in engines that look for the word."""
        if self._engine is Engine.TRANSFORMERS:
            return []
        return [entry for entry in self._entries if EXPERTS in entry and module in entry]

    def _spellings(self, module: str) -> Collection[str]:
        """Every entry that would cover a module."""
        parts = module.split(".")
        starts = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if self._engine is Engine.VLLM:
            return {module}
        if self._engine is Engine.TRANSFORMERS:
            return {*starts, *(module[start:] for start in range(len(module)))}
        return {".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1)}


def substring_traps(entries: Collection[str], modules: Collection[str]) -> list[tuple[str, str]]:
    """(entry, module) where the entry stands in the module's name, but not between dots."""
    return [
        (entry, module)
        for module in modules
        for entry in entries
        if entry in module and f".{entry}." not in f".{module}."
    ]


def quantized_modules(model: EngineFiles) -> list[str]:
    """The modules that are E4M3 and may be."""
    allowed = QUANTIZABLE - {Role.LM_HEAD}
    return list(dict.fromkeys(found.module for found in model.found if found.quantized and found.spec.role in allowed))


def unquantized_linears(model: EngineFiles, engine: Engine) -> list[str]:
    """The modules that are not E4M3 and that the engine builds as E4M3 unless they are listed."""
    names = {spec.name for spec in model.contract}
    served = engine is not Engine.TRANSFORMERS

    def linear(found: Found) -> bool:
        role = found.spec.role
        if found.quantized or len(found.spec.shape) != 2 or (found.spec.part is Part.MTP and not served):
            return False
        if role is Role.VISION:  # its linears have a bias; its embedding has none
            return f"{found.module}.bias" in names
        if role is Role.LM_HEAD or found.spec.key.endswith("shared_gate"):
            return not served  # vLLM and SGLang build these unquantised whatever the list says
        return role in QUANTIZABLE or role in (Role.GATE, Role.MTP_PROJECTION)

    return list(dict.fromkeys(found.module for found in model.found if linear(found)))
