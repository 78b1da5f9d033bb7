"""Local state of a stage: checkpoints (``CheckpointStore``) and the redo journal between them (``Journal``)."""

from swarm.state.checkpoint import Checkpoint, CheckpointStore
from swarm.state.journal import Journal, Record, RecordKind

__all__ = ["Checkpoint", "CheckpointStore", "Journal", "Record", "RecordKind"]
