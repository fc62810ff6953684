"""Builds the training documents and the held-out texts from two unpacked Debian packages.

Both sources are public domain: Jane Austen's six novels (r-cran-janeaustenr) and a modern-English Bible
(sword-text-web). What comes out is normalised and cut into chapters, hence a changed text, which must not carry the
name of that Bible translation.

The output is a function of the packages alone (every random choice has seed 0):
    WORK/train.json                   list of documents in training order: chapters, and groups of three chats
    WORK/heldout/{bible.txt,austen.txt,chat.json}
"""

import argparse
import json
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import heldout
import rdata
from pysword.modules import SwordModules

AUSTEN_DATA = Path("usr/lib/R/site-library/janeaustenr/data")
BIBLE_DATA = Path("usr/share/sword")
BIBLE_MODULE = "engWEB2015eb"
NOVELS = {  # object in the R package -> title, in the order the package stores them
    "emma": "Emma",
    "mansfieldpark": "Mansfield Park",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
    "prideprejudice": "Pride and Prejudice",
    "sensesensibility": "Sense and Sensibility",
}

# Typographic characters are folded to ASCII: a 4,096-entry vocabulary has no room for two kinds of quote.
PLAIN_PUNCTUATION = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "\u00a0": " "},
)

# Every 40th chapter of the Bible and every 30th of Austen is held out, counting from the 8th.
BIBLE_HELD_OUT_EVERY, AUSTEN_HELD_OUT_EVERY, HELD_OUT_FIRST = 40, 30, 7
CHATS_PER_DOCUMENT = 3
# The turn markers below must be those of ../checkpoint/chat_template.jinja.
CHAT = "<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{assistant}<|im_end|>\n"


@dataclass(frozen=True)
class Chapter:
    """One chapter: of a Bible book (`parts` are verses) or of a novel (`parts` are paragraphs)."""

    book: str
    number: int
    parts: list[str]


def bible_document(chapter: Chapter) -> str:
    """The chapter as training text: heading, then the verses as one paragraph."""
    return f"{chapter.book} {chapter.number}\n\n" + " ".join(chapter.parts)


def austen_document(chapter: Chapter) -> str:
    """The chapter as training text: heading, then the paragraphs."""
    return f"{chapter.book}, Chapter {chapter.number}\n\n" + "\n\n".join(chapter.parts)


def squeeze(text: str) -> str:
    """Runs of white space become one space; none at the ends."""
    return re.sub(r"\s+", " ", text).strip()


def read_bible(package: Path) -> list[Chapter]:
    """Reads the SWORD module verse by verse; notes, titles and markup are dropped."""
    modules = SwordModules(str(package / BIBLE_DATA))
    modules.parse_modules()
    bible = modules.get_bible_from_module(BIBLE_MODULE)
    chapters = []
    for books in bible.get_structure().get_books().values():  # one entry per testament
        for book in books:
            for number in range(1, book.num_chapters + 1):
                verses = []
                for verse in range(1, book.chapter_lengths[number - 1] + 1):
                    osis = bible.get(books=[book.name], chapters=[number], verses=[verse], clean=False)
                    if text := clean_verse(osis):
                        verses.append(text)
                if verses:
                    chapters.append(Chapter(book.name, number, verses))
    return chapters


def clean_verse(osis: str) -> str:
    """The words of a verse in OSIS markup. A tag leaves no space behind, so spaces before punctuation go too."""
    text = re.sub(r"<note.*?</note>", " ", osis, flags=re.DOTALL)
    text = re.sub(r"<title.*?</title>", " ", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", "", text)
    text = squeeze(text.translate(PLAIN_PUNCTUATION))
    return re.sub(r" ([,.;:!?])", r"\1", text)


def read_austen(package: Path) -> list[Chapter]:
    """Cuts each novel at its chapter headings and numbers the chapters through, whatever the volume says."""
    novels = read_r_database(package / AUSTEN_DATA / "Rdata")
    chapters = []
    for key, title in NOVELS.items():
        text = "\n".join(novels[key]).translate(PLAIN_PUNCTUATION).replace("_", "")
        _, *bodies = re.split(r"\n\s*chapter\s+[ivxl\d]+\.?\s*\n", text, flags=re.IGNORECASE)
        for number, body in enumerate(bodies, 1):
            paragraphs = [squeeze(paragraph) for paragraph in re.split(r"\n\s*\n", body)]
            paragraphs = [
                paragraph
                for paragraph in paragraphs
                if len(paragraph) > 1 and not re.match(r"^(VOLUME|END OF|THE END|FINIS)", paragraph)
            ]
            if paragraphs:
                chapters.append(Chapter(title, number, paragraphs))
    return chapters


def read_r_database(stem: Path) -> dict[str, list[str]]:
    """Reads the character vectors of an R lazy-load database: stem.rdx is the index, stem.rdb the objects.

    An entry of the .rdb is [u32 size] and the zlib data of one serialised object, which is what this package holds
    (other databases may use bzip2 or LZMA; zlib refuses them).
    """
    index = parse_r_object(stem.with_suffix(".rdx").read_bytes())
    blob = stem.with_suffix(".rdb").read_bytes()
    vectors = {}
    for name, (offset, length) in index["variables"].items():
        serialised = zlib.decompress(blob[int(offset) + 4 : int(offset) + int(length)])
        vectors[str(name)] = ["" if line is None else str(line) for line in parse_r_object(serialised)]
    return vectors


def parse_r_object(data: bytes) -> Any:
    """One object in R's serialisation as Python and numpy values."""
    return rdata.conversion.convert(rdata.parser.parse_data(data, extension=".rds"))


def make_chats(bible: list[Chapter], austen: list[Chapter], rng: random.Random) -> list[str]:
    """One-turn chats that ask for a chapter, or for the continuation of a verse or paragraph."""
    chats = []

    def add(user: str, assistant: str) -> None:
        chats.append(CHAT.format(user=user, assistant=assistant))

    for chapter in bible:
        place, verses = (chapter.book, chapter.number), chapter.parts
        if opening := leading_verses(verses, limit=700):
            question = rng.choice(["Tell me about {} {}.", "Read {} {}.", "What does {} chapter {} say?"])
            add(question.format(*place), opening)
        if len(verses) > 8 and rng.random() < 0.6:
            start = rng.randrange(1, len(verses) - 4)
            if len(verses[start]) < 250:
                add("Continue: " + verses[start], " ".join(verses[start + 1 : start + 4])[:900])
    for chapter in austen:
        paragraphs = chapter.parts
        for start in range(0, len(paragraphs) - 3, 5):
            answer = "\n\n".join(paragraphs[start + 1 : start + 3])
            if 40 < len(paragraphs[start]) < 400 and 60 < len(answer) < 1000:
                request = rng.choice(["Continue: ", f"Continue this passage from {chapter.book}: "])
                add(request + paragraphs[start], answer)
    return chats


def leading_verses(verses: list[str], limit: int) -> str:
    """The first verses, joined by spaces, as long as the text before each one and the verse stay within `limit`."""
    text = ""
    for verse in verses:
        if len(text) + len(verse) > limit:
            break
        text = f"{text} {verse}".strip()
    return text


def split(chapters: list[Chapter], every: int) -> tuple[list[Chapter], list[Chapter]]:
    """Returns (training, held out)."""
    held_out = [i % every == HELD_OUT_FIRST for i in range(len(chapters))]
    return (
        [chapter for chapter, out in zip(chapters, held_out, strict=True) if not out],
        [chapter for chapter, out in zip(chapters, held_out, strict=True) if out],
    )


def main() -> None:
    """Reads the packages and writes WORK/train.json and WORK/heldout/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("austen", type=Path, help="r-cran-janeaustenr, unpacked with dpkg-deb -x")
    parser.add_argument("bible", type=Path, help="sword-text-web, unpacked with dpkg-deb -x")
    parser.add_argument("work", type=Path, help="folder to write to")
    arguments = parser.parse_args()

    rng = random.Random(0)
    bible, bible_out = split(read_bible(arguments.bible), BIBLE_HELD_OUT_EVERY)
    austen, austen_out = split(read_austen(arguments.austen), AUSTEN_HELD_OUT_EVERY)
    chats = make_chats(bible, austen, rng)
    chats_out = make_chats(bible_out, austen_out, rng)

    documents = [*map(bible_document, bible), *map(austen_document, austen)]
    rng.shuffle(chats)
    documents += ["".join(chats[i : i + CHATS_PER_DOCUMENT]) for i in range(0, len(chats), CHATS_PER_DOCUMENT)]
    rng.shuffle(documents)

    heldout.write(
        arguments.work / "heldout",
        {
            "bible": [bible_document(chapter) for chapter in bible_out],
            "austen": [austen_document(chapter) for chapter in austen_out],
            "chat": chats_out,
        },
    )
    (arguments.work / "train.json").write_text(json.dumps(documents), encoding="utf-8")
    print(f"chapters: {len(bible)} + {len(austen)} to train on, {len(bible_out)} + {len(austen_out)} held out")
    print(f"chats: {len(chats)} and {len(chats_out)}; {sum(map(len, documents)) / 1e6:.2f} M characters in all")


if __name__ == "__main__":
    main()
