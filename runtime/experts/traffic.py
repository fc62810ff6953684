"""What an expert store counts: where experts were found, and what it took to get the others."""

from dataclasses import asdict, dataclass


@dataclass
class Traffic:
    """Sums since the start. Every expert of a layer call is a hit or a miss once, for however many tokens."""

    hits: int = 0  # in memory
    misses: int = 0
    disk_bytes: int = 0  # read
    disk_seconds: float = 0.0  # in which something was being read
    stall_seconds: float = 0.0  # waiting for the disk with nothing to compute
    ahead: int = 0  # experts read before the router chose, and
    ahead_used: int = 0  # of these, chosen
    device_hits: int = 0  # experts of layer calls that a device had; these are neither hits nor misses here
    device_bytes: int = 0  # of experts copied to a device
    foretold: int = 0  # experts chosen where a choice had been foretold, and
    foretold_right: int = 0  # of these, foretold

    def since(self, earlier: "Traffic") -> "Traffic":
        """What came after an earlier moment."""
        before = asdict(earlier)
        return Traffic(**{name: value - before[name] for name, value in asdict(self).items()})

    @property
    def hit_rate(self) -> float:
        """Share of hits; 1 if nothing was asked for."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    @property
    def recall(self) -> float | None:
        """Of what was chosen where a choice had been foretold, the share that was foretold."""
        return self.foretold_right / self.foretold if self.foretold else None

    def as_dict(self) -> dict[str, float | int | None]:
        """For --stats json."""
        return {
            "expert_hits": self.hits,
            "expert_misses": self.misses,
            "expert_hit_rate": round(self.hit_rate, 4),
            "device_expert_hits": self.device_hits,
            "device_bytes": self.device_bytes,
            "disk_bytes": self.disk_bytes,
            "disk_gb_s": round(self.disk_bytes / self.disk_seconds / 1e9, 3) if self.disk_seconds else 0.0,
            "stall_seconds": round(self.stall_seconds, 4),
            "read_ahead_experts": self.ahead,
            "read_ahead_and_used": self.ahead_used,
            "prefetch_recall": None if self.recall is None else round(self.recall, 4),
        }
