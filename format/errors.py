"""One error for everything a user can mend.

Bad input is an `InputError`: file, tensor, found, expected, remedy; exit code 2, no traceback. Anything else that
escapes is a bug of ours and shows its traceback.
"""

from pathlib import Path

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2


class InputError(Exception):
    """The input, or what was asked for, cannot be used as it is; nothing of the user's has been changed."""

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        found: object = None,
        expected: object = None,
        remedy: str,
    ) -> None:
        self.problem = problem
        facts = (("file", file), ("tensor", tensor), ("found", found), ("expected", expected), ("remedy", remedy))
        self.facts = {name: str(value) for name, value in facts if value is not None}
        super().__init__("\n".join([problem, *(f"  {name + ':':<10}{value}" for name, value in self.facts.items())]))
