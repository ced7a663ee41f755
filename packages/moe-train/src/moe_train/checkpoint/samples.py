"""The ledger of samples as a file of a checkpoint.

ledger = read_ledger(Path("checkpoint-40"))
"""

from pathlib import Path

from moe_train.data import Ledger
from unified_ckpt.files.storage import Location
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint

SAMPLES_FILE = "samples.json"


def read_ledger(source: Path | Location) -> Ledger:
    """Which samples the steps before a checkpoint have used; an empty one where none was kept.

    Raises:
        ValueError: the file is not a ledger.
        CheckpointError: the file is damaged.
    """

    def read(checkpoint: Checkpoint) -> bytes | None:
        return checkpoint.read_file(SAMPLES_FILE) if checkpoint.holds(SAMPLES_FILE) else None

    raw = read_checkpoint(source, read)
    return Ledger() if raw is None else Ledger.from_json(raw, source / SAMPLES_FILE)
