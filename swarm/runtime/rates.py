"""What rung of the ladder this peer's messages take: the measured links and the beat, handed to the core's controllers.

An activation takes the rung that its sender's uplink affords, and no richer one than the uplink of its receiver could
answer with: a gradient comes back in the rung of its activation, so receivers say their limit in the gradients they
send. A peer's two links leave through one uplink; each gets half of it.
"""

from __future__ import annotations

from swarm.config.spec import Rung, RunSpec


class Rates:
    """The rungs of one peer's messages.

    Args:
        spec: the run.
        stage: the stage of this peer.
    """

    def __init__(self, spec: RunSpec, stage: int) -> None:
        self.spec = spec
        self.stage = stage

    def activation_rung(self) -> Rung:
        """For the next activations that this stage sends."""
        return self.spec.rungs[0]

    def gradient_limit(self) -> int:
        """Index in the ladder of the richest rung that this peer could answer the stage before with."""
        return 0
