"""How long work tells how far it is, to whoever wants to know. Shows nothing itself."""

from collections.abc import Callable

#: Told what is about to be done and how many steps it has; what it returns is told of steps as they are done.
Progress = Callable[[str, int], Callable[[int], object]]


def silent(title: str, steps: int) -> Callable[[int], object]:
    """The progress that nobody looks at."""
    return lambda done: None
