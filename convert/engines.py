"""Whether vLLM, SGLang or transformers can load a checkpoint directory faithfully: their loading rules, from headers.

Unlike the invariants of docs/FORMAT.md these hold for any directory of a known family, and read no weights. What vLLM
and SGLang do was read in their sources; only transformers is run in our tests.
"""

from dataclasses import dataclass, field
from pathlib import Path

from mosaic.convert import engine_rules
from mosaic.convert.engine_files import Engine, EngineFiles
from mosaic.convert.engine_rules import Note, Rule
from mosaic.convert.verify import MOST, Result


@dataclass
class Finding(Result):
    """What became of one rule: as of an invariant, with what to do, and what is worth knowing but breaks nothing."""

    remedies: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A line, and one for each failure, remedy and note."""
        more = [f"remedy: {remedy}" for remedy in self.remedies] + [f"note: {note}" for note in self.notes]
        return "\n     ".join([super().text(), *more])


def check_for(engine: Engine, folder: Path) -> list[Finding]:
    """Check every rule of an engine; InputError if the directory is not a checkpoint of a known family at all.

    Rules about tensors are reported as not checked if the shards cannot be read as the index lists them.
    """
    model = EngineFiles(folder)
    return [_finding(rule, model, engine) for rule, engines in engine_rules.RULES if engine in engines]


def _finding(rule: Rule, model: EngineFiles, engine: Engine) -> Finding:
    name, title = (rule.__doc__ or "").split(" ", 1)
    finding = Finding(name, title.rstrip("."))
    if model.damage and rule is not engine_rules.index:
        finding.checked = False
        return finding
    for found in rule(model, engine):
        if isinstance(found, Note):
            finding.notes.append(found)
        elif len(finding.failures) < MOST:
            finding.failures.append(found.text)
            if found.remedy not in finding.remedies:
                finding.remedies.append(found.remedy)
    return finding
