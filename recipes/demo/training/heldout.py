"""The held-out texts: their files, how a file splits into documents, and the windows that perplexity is taken over.

Three texts, because a model may keep one style and lose another: chapters of a Bible, chapters of Jane Austen, and
chats made from those chapters. corpus.py writes them; tokenizer.py and evaluate.py read them back, so both see the
same documents and therefore the same windows. No model and no tokenizer here.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WINDOW = 256  # tokens the model sees at once, in training and in evaluation
CHAPTER_TEXTS = ("bible", "austen")  # plain chapters, heading first
NAMES = (*CHAPTER_TEXTS, "chat")

# A chapter opens with a line of its own that ends in the chapter's number: "Genesis 8", "Emma, Chapter 38".
_NEXT_CHAPTER = re.compile(r'\n\n(?=[^\n.!?;"]+ \d+\n\n)')


def write(folder: Path, documents: dict[str, list[str]]) -> None:
    """Writes bible.txt, austen.txt (chapters, a blank line between) and chat.json (a list of strings)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CHAPTER_TEXTS:
        (folder / f"{name}.txt").write_text("\n\n".join(documents[name]) + "\n", encoding="utf-8")
    (folder / "chat.json").write_text(json.dumps(documents["chat"], indent=0), encoding="utf-8")


def read(folder: Path) -> dict[str, list[str]]:
    """Returns the documents of each text, exactly as they were given to `write`."""
    documents = {}
    for name in CHAPTER_TEXTS:
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        documents[name] = _NEXT_CHAPTER.split(text.removesuffix("\n"))
    documents["chat"] = json.loads((folder / "chat.json").read_text(encoding="utf-8"))
    return documents


def windows(tokens: NDArray[np.int64], batch: int) -> Iterator[NDArray[np.int64]]:
    """Yields [<= batch, WINDOW + 1]: inputs and, shifted by one, targets. No overlap; a short tail is cut."""
    starts = range(0, len(tokens) - WINDOW - 1, WINDOW)
    for first in range(0, len(starts), batch):
        yield np.stack([tokens[start : start + WINDOW + 1] for start in starts[first : first + batch]])
