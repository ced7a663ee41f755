"""The checkpoint that a job uses, here or in a store.

with stored_model("s3://bucket/run/checkpoint-250") as (folder, weights):
    tokenizer = load_tokenizer(folder)  # `weights` is the store's place
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_train.checkpoint import small_files
from moe_train.errors import MissingFileError
from unified_ckpt.files.storage import Location, as_target

_NEEDED = ("config.json", "tokenizer.json")


@contextmanager
def stored_model(checkpoint: str) -> Iterator[tuple[Path, Path | Location]]:
    """Yield a folder with the config and tokenizer of a checkpoint, and where its weights are.

    Args:
        checkpoint: a folder, which is both, or the URL of a checkpoint in a store, whose small
            files are copied to a folder of this process until the end.

    Raises:
        MissingFileError: a checkpoint in a store has no config or tokenizer.
        CheckpointError: there is none, or it cannot be read.
    """
    place = as_target("checkpoint", checkpoint)
    with small_files(place) as folder:
        for name in _NEEDED if isinstance(place, Location) else ():
            if not (folder / name).is_file():
                raise MissingFileError(f"{place} holds no {name}; name a checkpoint-N of a run")
        yield folder, place
