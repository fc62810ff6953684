"""What one HTTP request used, for its answer, its log line and the metrics."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Tally:
    """Tokens. The prompt of several choices counts once."""

    prompt: int = 0
    cached: int = 0  # of the prompt, known from earlier requests
    completion: int = 0
    finish_reason: str | None = None

    def usage(self) -> dict[str, Any]:
        """As the API has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
