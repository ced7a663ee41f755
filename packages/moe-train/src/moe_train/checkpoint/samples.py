"""The ledger of samples as a file of a checkpoint.

ledger = read_ledger(Path("checkpoint-40"))
"""

from pathlib import Path

from moe_train.data import Ledger
from unified_ckpt import load_files

SAMPLES_FILE = "samples.json"


def read_ledger(source: Path) -> Ledger:
    """Which samples the steps before a checkpoint have used; an empty one where none was kept.

    Raises:
        ValueError: the file is not a ledger.
        CheckpointError: the file is damaged.
    """
    if not (source / SAMPLES_FILE).is_file():
        return Ledger()
    return Ledger.from_json(load_files(source, SAMPLES_FILE), source / SAMPLES_FILE)
