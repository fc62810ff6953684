"""mosaic.runtime: runs a model directory. `Engine` is its Python interface; see docs/PYTHON.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Load torch when the engine is asked for, and no sooner: programs show their help without it."""
    if name == "Engine":
        from mosaic.runtime.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
