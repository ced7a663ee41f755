"""The files of a checkpoint beside its tensors, as files of a local folder wherever it lies.

What reads configs and tokenizers reads folders; of a checkpoint in a store, these files are copied
to a temporary one, all of them of one checkpoint and compared with its checksums.

    with small_files(source) as folder:
        tokenizer = load_tokenizer(folder)
"""

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_train.checkpoint.samples import SAMPLES_FILE
from moe_train.config import OWN_TOML, STATE_FILE, Config, load_config
from moe_train.errors import MoeTrainError
from unified_ckpt.files.storage import Location
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint

_LARGE = (".safetensors", ".safetensors.index.json")
_OF_RANKS = "random_state-"


@contextmanager
def small_files(source: Path | Location, names: Collection[str] | None = None) -> Iterator[Path]:
    """Yield a folder with the files of a checkpoint beside tensors, ledger and random states.

    Args:
        source: a directory, which is yielded itself, or a checkpoint in a store.
        names: those that are wanted; None for all.

    Raises:
        CheckpointError: the checkpoint cannot be read, or a file is damaged.
    """
    if not isinstance(source, Location):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="moe-train-checkpoint-") as name:
        folder = Path(name)
        read_checkpoint(source, lambda checkpoint: _copy(checkpoint, folder, names))
        yield folder


def _copy(checkpoint: Checkpoint, folder: Path, names: Collection[str] | None) -> None:
    for name in sorted(checkpoint.names()):
        is_small = not name.endswith(_LARGE) and not name.startswith(_OF_RANKS)
        if name in names if names is not None else is_small and name != SAMPLES_FILE:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(checkpoint.read_file(name))


def own_job(source: Path | Location) -> Config | None:
    """The job that a checkpoint was made by, None where this version cannot read it.

    Raises:
        CheckpointError: it lies in a store and cannot be read.
    """
    with small_files(source, (OWN_TOML, STATE_FILE)) as folder:
        try:
            return load_config(folder / OWN_TOML)
        except MoeTrainError:
            return None
