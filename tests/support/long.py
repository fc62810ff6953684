"""A conversion that takes long enough to be interrupted anywhere: its checkpoint, its result, and how long it takes."""

import shutil
from pathlib import Path

from support.killing import Converter, same_tree
from support.tiny import Tiny, write_checkpoint

#: 26 shards of many small matrices, 320 MB: one to four seconds of work.
LONG = Tiny(layers=24, hidden=256, experts=64, moe_inter=128, vocab=2048, visual=False)


class Long:
    """`source`, what it converts to in `expected`, and per number of workers the seconds before and of the work."""

    def __init__(self, folder: Path, most_workers: int) -> None:
        self.source, self.expected = folder / "source", folder / "expected"
        write_checkpoint(LONG, self.source)
        self.seconds = {workers: self._measure(workers, folder / "measured") for workers in range(1, most_workers + 1)}

    def _measure(self, workers: int, out: Path) -> tuple[float, float]:
        converter = Converter(self.source, out, workers=workers)
        start = converter.reach_work()
        assert converter.end() == 0, converter.text
        if self.expected.exists():
            same_tree(out, self.expected)
            shutil.rmtree(out)
        else:
            out.rename(self.expected)
        return start, converter.seconds - start
