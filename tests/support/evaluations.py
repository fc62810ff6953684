"""Made-up evaluations."""

from mosaic.format.evaluation import Comparison, Divergence, Evaluation, Perplexity

ALONE = Evaluation(
    text="austen.txt",
    text_sha256="a" * 64,
    context=256,
    windows=2,
    tokens=510,
    ops="cpu",
    activations="f32",
    kv="bf16",
    perplexity=Perplexity(40.25, 0.5),
    comparison=None,
)
COMPARED = Evaluation(
    text="bible.txt",
    text_sha256="b" * 64,
    context=128,
    windows=1,
    tokens=1,
    ops="reference",
    activations=None,
    kv="f32",
    perplexity=Perplexity(22.5, None),
    comparison=Comparison(
        "checkpoint",
        ("BF16", "F32"),
        Perplexity(22.25, None),
        Perplexity(1.0125, 0.001),
        Divergence(0.00125, 0.0001, 0.00075, 0.0375, 0.28125),
        0.96875,
    ),
)
