"""Kills converters at random until it has killed enough of them, or until something is not as it must be.

    python tests/kill/torture.py [--kills 300] [--seed N]

The assertions are those of the tests; the moments, signals, workers and company are drawn by lot, so that every run
tries others. Not a test: it takes a second and a half per kill. Ends with one line; exit code 1, the seed and the
folder as it was found if something is wrong.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.killing import CATALOG, Converter, claims_nothing_false, is_refused, left_in, same_tree
from support.long import Long

SIGNALS = (signal.SIGKILL,) * 8 + (signal.SIGTERM, signal.SIGINT)
MOST_WORKERS = 4


class Torture:
    """One directory, converted to again and again."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance, self.out, self.counts = chance, folder / "out", Counter()
        self.long = Long(folder, MOST_WORKERS)

    def go_on(self) -> None:
        """Kill a converter, then perhaps have another finish what it left."""
        workers = self.chance.randint(1, MOST_WORKERS)
        converter = Converter(self.long.source, self.out, workers=workers)
        moment = self.chance.uniform(0.5 * self.long.seconds[workers][0], sum(self.long.seconds[workers]))
        second = None
        if self.chance.random() < 0.2:
            early = self.chance.uniform(0, moment)
            time.sleep(early)
            moment -= early
            second = Converter(self.long.source, self.out, workers=self.chance.randint(1, MOST_WORKERS))
        time.sleep(moment)
        number = self.chance.choice(SIGNALS)
        if converter.stop(number):
            self.counts[number.name] += 1
        else:
            self.counts["too late"] += 1
        if second:
            self.company(second)
        elif number == signal.SIGINT:
            converter.left(begun=0)
        else:
            converter.left()
        claims_nothing_false(self.out, self.long.expected)
        if self.chance.random() < 0.05 and not (self.out / CATALOG).exists():
            is_refused(self.out)
            self.counts["refused"] += 1
        if self.chance.random() < 0.5 or (self.out / CATALOG).exists():
            self.finish()

    def company(self, second: Converter) -> None:
        """A second converter was refused, or went on where the first one was killed."""
        code = second.end()
        assert code in (0, 2), (code, second.text)
        self.counts["second refused" if code else "second went on"] += 1
        if code:
            assert "error: another mosaic-convert" in second.text, second.text
        else:
            same_tree(self.out, self.long.expected)

    def finish(self) -> None:
        """Undisturbed."""
        left = left_in(self.out)
        converter = Converter(self.long.source, self.out, workers=self.chance.randint(1, MOST_WORKERS))
        assert converter.end() == 0, converter.text
        same_tree(self.out, self.long.expected)
        left.is_kept(self.out)
        self.counts["trees"] += 1
        shutil.rmtree(self.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mosaic-torture-"))
    begin = time.monotonic()
    torture = Torture(folder, random.Random(options.seed))
    counts = torture.counts
    try:
        while sum(counts[number.name] for number in set(SIGNALS)) < options.kills:
            torture.go_on()
        torture.finish()
    except BaseException as error:
        print(f"{type(error).__name__} after {dict(counts)}: seed {options.seed}, folder {folder}", file=sys.stderr)
        raise  # exit code 1, with the traceback that tells what was asserted
    shutil.rmtree(folder)
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{summary}: every tree identical, in {time.monotonic() - begin:.0f} s; seed {options.seed}")


if __name__ == "__main__":
    main()
