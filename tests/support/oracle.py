"""transformers as the oracle: someone else's code saying what a checkpoint means.

float32 with eager attention and eager experts, because the default CPU paths differ from eager in the last digits.
FP8 folders are dequantised while loading: with FP8 matmuls it would be another function. torch and transformers are
imported inside, so that test modules which may not need the oracle stay cheap to collect. MTP has no oracle here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


class Trace(NamedTuple):
    """One forward pass of T tokens."""

    logits: np.ndarray  # [T, V] float32
    hidden_states: list[np.ndarray]  # layers + 1 of [T, H]: from the embedding to what the final norm returns
    router_logits: list[np.ndarray]  # [T, E], one per MoE layer


class Decoded(NamedTuple):
    """Greedy decoding through the cache."""

    tokens: list[int]  # n
    logits: np.ndarray  # [n, V] float32: what each token was chosen from


def load(folder: Path, text_only: bool = True) -> PreTrainedModel:
    """The model of `folder`, every key accounted for. text_only=False loads the multimodal class with its vision."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config

    torch.set_num_threads(1)  # models this small gain little from more, and a spinning pool starves the code under test
    transformers.logging.disable_progress_bar()
    config = json.loads((Path(folder) / "config.json").read_text())
    options = {}
    if quantisation := config.get("quantization_config"):
        options["quantization_config"] = FineGrainedFP8Config(
            dequantize=True,
            weight_block_size=tuple(quantisation["weight_block_size"]),
            modules_to_not_convert=quantisation["modules_to_not_convert"],
        )
    transformers.logging.set_verbosity_error()
    model, report = (AutoModelForCausalLM if text_only else AutoModelForImageTextToText).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **options,
    )
    transformers.logging.set_verbosity_error()  # output_loading_info turns it up
    ignored = ("mtp.", "model.visual.") if text_only else ("mtp.",)
    strays = {kind: sorted(key for key in map(str, report[kind]) if not key.startswith(ignored)) for kind in report}
    assert not any(strays.values()), f"{folder}: transformers could not place every key: {strays}"
    return model.eval()


def logits(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """[T, V] float32 of one full pass, without a cache."""
    import torch

    with torch.inference_mode():
        return model(input_ids=_batch(ids), use_cache=False).logits[0].float().numpy()


def trace(model: PreTrainedModel, ids: Sequence[int]) -> Trace:
    """One full pass with what it did on the way."""
    import torch

    with torch.inference_mode():
        out = model(input_ids=_batch(ids), use_cache=False, output_hidden_states=True, output_router_logits=True)
    return Trace(
        out.logits[0].float().numpy(),
        [state[0].float().numpy() for state in out.hidden_states],
        [router.float().numpy() for router in out.router_logits],
    )


def decode(model: PreTrainedModel, ids: Sequence[int], n: int) -> Decoded:
    """Prefill, then n greedy tokens one at a time."""
    import torch

    tokens: list[int] = []
    steps = []
    cache, batch = None, _batch(ids)
    with torch.inference_mode():
        for _ in range(n):
            out = model(input_ids=batch, cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits[0, -1].float().numpy())
            tokens.append(int(steps[-1].argmax()))
            batch = _batch(tokens[-1:])
    return Decoded(tokens, np.stack(steps))


def greedy(model: PreTrainedModel, ids: Sequence[int], n: int) -> list[int]:
    """The n tokens of `decode`."""
    return decode(model, ids, n).tokens


def _batch(ids: Sequence[int]):
    import torch

    return torch.as_tensor(np.asarray(ids), dtype=torch.long).view(1, -1)
