"""A YAML file as plain values: mappings, lists and scalars. What else YAML can do is refused: it could only surprise.

So no anchors and aliases, tags, second documents, nor keys that stand twice (the last would win silently).
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mosaic.format.errors import InputError

MAX_BYTES = 64 << 10


def read_plain_yaml(file: Path, what: str) -> object:
    """The only document of a file; InputError, naming `what` it should have been, for everything else."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        return yaml.load(data.decode("utf-8"), _PlainLoader)
    except OSError as error:
        raise _refused(file, what, error.strerror) from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise _refused(file, what, f"{line}{error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise _refused(file, what, str(error).partition("\n")[0]) from error


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias", problem_mark=self.current_event.start_mark)
        event = self.current_event  # which check_event has made the next one
        if event.anchor is not None or event.tag is not None:
            raise yaml.MarkedYAMLError(problem="an anchor or a tag", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refused(file: Path, what: str, found: object) -> InputError:
    return InputError(f"cannot read {what}", file=file, found=found, expected="YAML", remedy="mend it, or name another")
