"""Load or compute? What this engine has measured of both, and which comes sooner.

A load is chosen unless it is estimated to take longer than computing the same tokens; waiting for blocks that
come from NVMe is bounded by what computing them takes, so that a slow disk costs at most twice. Both are
times as requests see them, the company of other requests included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT_SHARE = 0.8
"""Weight of what was known when something new is measured: the last dozen requests count."""

FORGIVEN_SHARE = 0.7
"""What a refused load leaves of the measured slowness, so that a way that was slow once is tried again."""

LOAD_OVERHEAD_S = 0.003
"""Two round trips and a step of the engine, whatever the size of the load."""


MEASURED_BLOCKS_MIN = 4
"""A shorter prefill tells what a step costs, not what a token does."""


@dataclass(slots=True)
class Rate:
    """Seconds per unit over what was measured lately, large measurements counting more."""

    seconds: float = 0.0
    units: float = 0.0

    def measured(self, seconds: float, units: float) -> None:
        """Takes a measurement; without units there is nothing to learn."""
        if units > 0 and seconds >= 0:
            self.seconds = self.seconds * KEPT_SHARE + seconds
            self.units = self.units * KEPT_SHARE + units

    def forgive(self) -> None:
        """Believes in a faster rate, as nothing new will be measured."""
        self.seconds *= FORGIVEN_SHARE

    def of(self, units: float) -> float | None:
        """Seconds for so many units; None before the first measurement."""
        return self.seconds / self.units * units if self.units else None


@dataclass(slots=True)
class Estimates:
    """One engine's.

    Args:
        block_tokens: tokens per block.
        wait_max_s: longest wait for blocks, also while nothing has been measured.
    """

    block_tokens: int
    wait_max_s: float
    _compute: Rate = field(default_factory=Rate)
    _load: Rate = field(default_factory=Rate)

    def computed(self, seconds: float, tokens: int) -> None:
        """A prompt's tokens were computed in this time."""
        if tokens >= MEASURED_BLOCKS_MIN * self.block_tokens:
            self._compute.measured(seconds, tokens)

    def loaded(self, seconds: float, blocks: int) -> None:
        """Blocks were loaded in this time."""
        self._load.measured(max(0.0, seconds - LOAD_OVERHEAD_S), blocks)

    def compute_s(self, blocks: int) -> float | None:
        """Time to compute so many blocks; None before the first prompt."""
        return self._compute.of(blocks * self.block_tokens)

    def wait_s(self, blocks: int) -> float:
        """How long it pays to wait for so many blocks."""
        compute = self.compute_s(blocks)
        return self.wait_max_s if compute is None else min(compute, self.wait_max_s)

    def load_pays(self, blocks: int) -> bool:
        """Whether loading comes sooner than computing, as far as is known."""
        compute, load = self.compute_s(blocks), self._load.of(blocks)
        if compute is None or load is None or LOAD_OVERHEAD_S + load <= compute:
            return True
        self._load.forgive()
        return False
