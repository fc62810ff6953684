"""The loading rules of vLLM, SGLang and transformers, one function each: title, what breaks it, what to do.

Numbered as in docs/SERVING.md, which says where each comes from. Every rule needs the tensors of `EngineFiles` but L3.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mosaic.convert.engine_files import Engine, EngineFiles, Found
from mosaic.convert.engine_parallel import sizes, splits
from mosaic.convert.engine_skip import SkipList, quantized_modules, substring_traps, unquantized_linears
from mosaic.convert.verify import MOST
from mosaic.format import e4m3, layout
from mosaic.format.jsonfile import read_json
from mosaic.format.tensors import QUANTIZABLE, Part, Role, scale_name

SERVED = frozenset((Engine.VLLM, Engine.SGLANG))
ALL = frozenset(Engine)
RECONVERT = "convert the original checkpoint with mosaic-convert, recipe e4m3, and serve its output"
DOWNLOAD = "finish the download, or download again: weights, index and config.json must belong together"


class Flaw(NamedTuple):
    """One thing that breaks a rule, and what to do."""

    text: str
    remedy: str = RECONVERT


class Note(str):
    """Something worth knowing that breaks no rule."""


Findings = Iterator[Flaw | Note]
Rule = Callable[[EngineFiles, Engine], Findings]


def quantization(model: EngineFiles, engine: Engine) -> Findings:
    """L1 config.json describes block FP8, exactly if any tensor is."""
    fp8, stated = bool(model.quantized_roles), model.config.get("quantization_config")
    if stated is None and fp8:
        yield Flaw("E4M3 tensors but no quantization_config: codes would be taken for weights")
        return
    if stated is None:
        return
    if not fp8:
        remove = "remove quantization_config from config.json, or use the FP8 tensors that belong to it"
        yield Flaw("quantization_config, but no tensor is E4M3", remove)
    wanted: dict[str, object] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [e4m3.BLOCK, e4m3.BLOCK],
    }
    for key, value in (wanted | ({"fmt": "e4m3"} if "fmt" in model.quantization else {})).items():
        if model.quantization.get(key) != value:
            remedy = "write quantization_config as docs/FORMAT.md section 4 says, if the tensors are stored so"
            yield Flaw(f"quantization_config.{key} is {model.quantization.get(key)!r:.60}; expected {value!r}", remedy)
    for key in ("modules_to_not_convert", "ignored_layers"):
        entries = model.quantization.get(key)
        if entries is not None and not (isinstance(entries, list) and all(isinstance(e, str) for e in entries)):
            yield Flaw(f"quantization_config.{key} is {entries!r:.60}; expected a list of strings")


def names(model: EngineFiles, engine: Engine) -> Findings:
    """L2 The model class is one the engine has, and the names are those it looks for."""
    kind, nested = model.config["model_type"], "text_config" in model.config
    classes = model.architecture.HF_CLASSES
    main, text_only = model.architecture.MODEL_TYPES[0], model.architecture.MODEL_TYPES[1:]
    if classes[kind].endswith("ForConditionalGeneration") != nested:
        yield Flaw(f"model_type {kind} {'with' if nested else 'without'} text_config", "use the original config.json")
    stated = model.config.get("architectures")
    if engine in SERVED and not (isinstance(stated, list) and classes[kind] in stated):
        remedy = "set architectures in config.json to what is expected"
        yield Flaw(f"architectures is {stated!r:.80}; expected [{classes[kind]!r}]", remedy)
    if kind in text_only and engine is Engine.SGLANG:
        yield Flaw(f"{classes[kind]}: SGLang registers no such class", f"use a checkpoint of model_type {main}")
    elif kind in text_only:
        yield Note(f"{classes[kind]} is text only" + (", in recent vLLM alone" if engine is Engine.VLLM else ""))
    other = next((found for found in model.found if found.spec.pieces[-1].name != found.spec.name), None)
    if other and engine in SERVED:
        remedy = "rename the tensors; mosaic-convert does, from the original and from FP8 alike"
        yield Flaw(f"{other.piece.name} where {other.spec.name} belongs by model_type {kind}", remedy)
    elif other:
        yield Note(f"{other.piece.name}: only AutoModelForCausalLM takes these names with model_type {kind}")


def index(model: EngineFiles, engine: Engine) -> Findings:
    """L3 The index names every tensor of sound shards, and their size."""
    if model.damage:
        facts = dict(model.damage.facts)
        remedy = facts.pop("remedy")
        yield Flaw("; ".join([model.damage.problem, *(f"{name}: {value}" for name, value in facts.items())]), remedy)
        return
    file = model.folder / layout.INDEX_FILE
    for name in model.unlisted:
        yield Flaw(f"{name} is not in {layout.INDEX_FILE}", DOWNLOAD)
    if model.stray:
        yield Note(f"not in the index, so not loaded; old SGLang may: {', '.join(model.stray[:MOST])}")
    if not file.is_file():
        return
    metadata = read_json(file).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(info.nbytes for info in model.tensors.values())
    if type(size) not in (int, float):
        yield Flaw(f"metadata.total_size is {size!r:.60}; the tensors have {total}", DOWNLOAD)
    elif size != total:
        yield Note(f"metadata.total_size is {size}; the tensors have {total} bytes")


def experts(model: EngineFiles, engine: Engine) -> Findings:
    """L4 E4M3 experts stand one by one, each weight with its scales."""
    stacks: set[str] = set()
    for found in model.found:
        name = found.piece.name
        if found.spec.role is not Role.ROUTED_EXPERTS or not found.quantized or name in stacks:
            continue
        if found.stacked:
            stacks.add(name)
            yield Flaw(f"{name}: E4M3 experts in one tensor; their scales would be ignored")
        elif found.scale is None:
            yield Flaw(f"{name}: no {scale_name(name)}", DOWNLOAD)


def merged(model: EngineFiles, engine: Engine) -> Findings:
    """L5 Linears that the engine merges are all E4M3 or none is."""
    groups: dict[str, dict[bool, Found]] = {}
    for found in model.found:
        merges = engine in SERVED or found.spec.role is Role.ROUTED_EXPERTS
        if found.spec.fusion and merges and found.spec.role in QUANTIZABLE:
            groups.setdefault(found.spec.fusion, {}).setdefault(found.quantized, found)
    for group in groups.values():
        if len(group) > 1:
            yield Flaw(f"{group[True].piece.name} is E4M3, {group[False].piece.name} is {group[False].info.dtype}")


def blocks(model: EngineFiles, engine: Engine) -> Findings:
    """L6 E4M3 matrices are whole blocks, and so is what each GPU gets."""
    remedy = "keep these tensors in BF16: mosaic-convert does"
    ragged = [found for found in model.found if found.quantized and not e4m3.whole_blocks(found.spec.shape)]
    for found in ragged:
        if found.spec.role in QUANTIZABLE:  # else L7 has something to say
            yield Flaw(f"{found.piece.name}: E4M3 of shape {list(found.spec.shape)}", remedy)
    if engine not in SERVED or ragged:
        return
    plain, experts = (sizes(model.spec, model.quantized_roles, parallel) for parallel in (False, True))
    for part in splits(model.spec, model.quantized_roles, expert_parallel=False):
        if not part.fits(1):
            rows = part.number * part.width
            yield Flaw(f"{part.what}: {rows} rows merged with others, not a multiple of {e4m3.BLOCK}", remedy)
    if plain:
        beside = f"; with expert parallelism {_listed(experts)}" if set(experts) - set(plain) else ""
        yield Note(f"tensor parallel {_listed(plain)}{beside}")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def roles(model: EngineFiles, engine: Engine) -> Findings:
    """L7 Head, embeddings, routers, gates, norms and vision are not E4M3: engines build them unquantised."""
    for found in model.found:
        if found.quantized and found.spec.role is Role.LM_HEAD:
            why = "the engine builds it unquantised" if engine in SERVED else "read well on a CPU, never tried on a GPU"
            yield Flaw(f"{found.piece.name}: E4M3, as in no official release: {why}",
                       f"{RECONVERT} (recipe e4m3-head is for mosaic-run)")  # fmt: skip
        elif found.quantized and found.spec.role not in QUANTIZABLE:
            yield Flaw(f"{found.piece.name}: E4M3 for role {found.spec.role}")


def whole_stacks(model: EngineFiles, engine: Engine) -> Findings:
    """L8 No skip-list entry reaches experts that are E4M3: it would switch all experts of the layer."""
    skip = SkipList(engine, model.skip_list)
    for module in quantized_modules(model):
        for entry in skip.stack_entries(module):
            remedy = "remove the entry; if an expert really is BF16, convert the original again"
            yield Flaw(f"{entry} switches {module}, which is E4M3", remedy)


def substrings(model: EngineFiles, engine: Engine) -> Findings:
    """L9 Older SGLang matches skip entries by substring: a note only."""
    for entry, module in substring_traps(model.skip_list, quantized_modules(model))[:MOST]:
        yield Note(f"the entry {entry} stands in {module} too: use an SGLang that has its pull request 23467")


def complete(model: EngineFiles, engine: Engine) -> Findings:
    """L10 Every tensor of the model is there, once, in its shape; engines do not miss one that is not."""
    for spec in model.missing:
        if spec.part is not Part.MTP:  # L12
            yield Flaw(f"{' or '.join(dict.fromkeys(piece.name for piece in spec.pieces))}: absent", DOWNLOAD)
    for name in model.unknown:
        yield Flaw(f"{name}: no tensor of this family", DOWNLOAD)
    shown: set[str] = set()
    for found in model.found:
        name, info = found.piece.name, found.info
        doubles = {piece.name for piece in found.spec.pieces if piece.name in model.tensors} - {name}
        for double in sorted(doubles):
            yield Flaw(f"{double} and {name} are the same weights", DOWNLOAD)
        if name in shown:
            continue
        shown.add(name)
        if info.shape != found.piece.shape:
            yield Flaw(f"{name}: {list(info.shape)}; expected {list(found.piece.shape)}", DOWNLOAD)
        if info.dtype not in layout.WIDTH:
            yield Flaw(f"{name}: {info.dtype}; expected {', '.join(layout.WIDTH)}")
    if "vision_config" in model.config and not model.has(Part.VISION):
        yield Note("no vision tower: serve text only (vLLM: --language-model-only)")


def scales(model: EngineFiles, engine: Engine) -> Findings:
    """L11 Every E4M3 weight has BF16 or F32 scales of its grid, and nothing else has any."""
    for found in model.found:
        name, scale = found.piece.name, found.scale
        if found.stacked:
            continue  # L4
        if scale is None:
            if found.quantized and found.spec.role is not Role.ROUTED_EXPERTS:
                yield Flaw(f"{name}: no {scale_name(name)}", DOWNLOAD)
        elif not found.quantized:
            yield Flaw(f"{scale_name(name)}: scales of a weight that is {found.info.dtype}")
        elif scale.dtype not in ("BF16", "F32"):
            yield Flaw(f"{scale_name(name)}: {scale.dtype}; expected BF16 or F32")
        elif len(found.spec.shape) != 2 or scale.shape != e4m3.grid(found.spec.shape):
            yield Flaw(f"{scale_name(name)}: {list(scale.shape)} for a weight {list(found.spec.shape)}")


def mtp(model: EngineFiles, engine: Engine) -> Findings:
    """L12 The multi-token-prediction block is there whole or not at all, as config.json says."""
    for spec in model.missing:
        if spec.part is Part.MTP:
            yield Flaw(f"{spec.name}: absent, but other tensors of the block are there", DOWNLOAD)
    text = model.config.get("text_config", model.config)
    stated, there = text.get("mtp_num_hidden_layers"), model.has(Part.MTP)
    if there and stated not in (None, 1):
        remedy = "set mtp_num_hidden_layers to 1, or convert with a recipe that drops part mtp"
        yield Flaw(f"mtp_num_hidden_layers is {stated!r:.20}, and there is one such block", remedy)
    if stated and not there:
        yield Note(f"mtp_num_hidden_layers is {stated!r:.20}, but there is no block: do not ask for mtp drafting")


def companions(model: EngineFiles, engine: Engine) -> Findings:
    """L13 Tokenizer and, with a vision tower, preprocessors are there."""

    def has(*names: str) -> bool:
        return all((model.folder / name).is_file() for name in names)

    copy = "add the file to the checkpoint and convert again; to what is not of mosaic-convert, copy it"
    if not has("tokenizer.json") and not has("vocab.json", "merges.txt"):
        yield Flaw("tokenizer.json: absent", copy)
    if not has("tokenizer_config.json"):
        yield Flaw("tokenizer_config.json: absent", copy)
    if model.has(Part.VISION):
        wanted = ("preprocessor_config.json", "video_preprocessor_config.json")
        yield from (Flaw(f"{name}: absent, and there is a vision tower", copy) for name in wanted if not has(name))
    if not has("generation_config.json"):
        yield Note("no generation_config.json: sampling and stop tokens of the model's maker are not applied")


def listed_modules(model: EngineFiles, engine: Engine) -> Findings:
    """L14 The skip list names every linear that is not E4M3 and none that is."""
    if not model.quantization or not model.quantized_roles:
        return  # L1
    skip, quantized = SkipList(engine, model.skip_list), quantized_modules(model)
    for module in unquantized_linears(model, engine):
        if module not in quantized and not skip.covers(module) and not skip.stack_entries(module):  # in both: L5
            yield Flaw(f"{module} is not E4M3 and not listed: its weights would be cast to E4M3 without scales",
                       "add these modules to modules_to_not_convert in config.json")  # fmt: skip
    for module in quantized:
        if skip.covers(module) and not skip.stack_entries(module):  # else L8
            yield Flaw(f"{module} is E4M3 and listed: its codes would be taken for weights",
                       "remove these modules from modules_to_not_convert in config.json")  # fmt: skip
    if patterns := [entry for entry in model.skip_list if not entry.replace(".", "").replace("_", "").isalnum()]:
        yield Note(f"entries that are patterns are not judged: {', '.join(patterns[:MOST])}")


RULES: tuple[tuple[Rule, frozenset[Engine]], ...] = (
    (quantization, ALL),
    (names, ALL),
    (index, ALL),
    (experts, ALL),
    (merged, ALL),
    (blocks, ALL),
    (roles, ALL),
    (whole_stacks, SERVED),
    (substrings, frozenset((Engine.SGLANG,))),
    (complete, ALL),
    (scales, ALL),
    (mtp, SERVED),
    (companions, SERVED),
    (listed_modules, ALL),
)
