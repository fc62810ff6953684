"""The engine `llama.cpp` for tests/bench/engine.py. Started by it with an interpreter that has llama-cpp-python.

python tests/bench/engine_llama.py GGUF THREADS TOKENS...

TOKENS are the token ids that are fed, as many as are ever asked for. Knows nothing of Mosaic, whose environment is
another; speaks as engine_worker says.
"""

import json
import sys
import time

import llama_cpp as llama

CHUNK = 1024  # tokens computed together, as Mosaic does
SHORT_PROMPT = 16  # as mosaic.runtime.bench has it


class Model:
    """A loaded GGUF with one sequence; everything on the CPU, nothing sampled."""

    def __init__(self, file: str, threads: int, context: int) -> None:
        llama.llama_backend_init()
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(file.encode(), parameters)
        assert self._model, f"cannot load {file}"
        settings = llama.llama_context_default_params()
        settings.n_ctx = context
        settings.n_batch = settings.n_ubatch = CHUNK
        settings.n_threads = settings.n_threads_batch = threads
        settings.no_perf = True
        self._context = llama.llama_init_from_model(self._model, settings)
        assert self._context, "cannot make a context"
        self._batch = llama.llama_batch_init(CHUNK, 0, 1)
        self._length = 0

    def clear(self) -> None:
        """Forget everything."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        self._length = 0

    def extend(self, tokens: list[int], logits: bool) -> None:
        """Compute at most CHUNK further tokens; with the logits of the last one, if asked for."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = self._length + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = False
        batch.logits[len(tokens) - 1] = logits
        code = llama.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode: {code}"
        if logits:
            assert llama.llama_get_logits_ith(self._context, -1)  # waits until they are there
        self._length += len(tokens)


def prefill_seconds(model: Model, tokens: list[int]) -> float:
    """Seconds from nothing to the logits after the last token."""
    model.clear()
    start = time.perf_counter()
    for first in range(0, len(tokens), CHUNK):
        chunk = tokens[first : first + CHUNK]
        model.extend(chunk, logits=first + len(chunk) == len(tokens))
    return time.perf_counter() - start


def decode_seconds(model: Model, tokens: list[int]) -> float:
    """Seconds for the logits after each of the tokens behind the first SHORT_PROMPT, one by one."""
    model.clear()
    model.extend(tokens[:SHORT_PROMPT], logits=True)
    start = time.perf_counter()
    for token in tokens[SHORT_PROMPT:]:
        model.extend([token], logits=True)
    return time.perf_counter() - start


def main() -> None:
    """Answer requests until there are no more."""
    file, threads, *rest = sys.argv[1:]
    tokens = [int(token) for token in rest]
    model = Model(file, int(threads), context=len(tokens))
    requests = {
        "decode": lambda count: decode_seconds(model, tokens[: SHORT_PROMPT + count]),
        "prefill": lambda count: prefill_seconds(model, tokens[:count]),
    }
    print("{}", flush=True)
    for line in sys.stdin:
        ((name, argument),) = json.loads(line).items()
        print(json.dumps({"seconds": requests[name](argument)}), flush=True)


if __name__ == "__main__":
    main()
