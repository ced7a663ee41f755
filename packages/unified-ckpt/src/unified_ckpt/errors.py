"""The errors of this package: every one names the rank, key or file, what was found, and a remedy.

try:
    save(parts, checkpoint_id="run/checkpoint-10")
except CheckpointError as error:
    print(error)  # rank 3 failed in 'write': OSError: [Errno 28] No space left on device: ...
"""


class CheckpointError(RuntimeError):
    """Base of all errors of this package."""


class SaveError(CheckpointError):
    """A save failed on at least one rank; raised on every rank that still runs."""


class SaveArgumentError(SaveError, ValueError):
    """The arguments of a save are wrong; raised on every rank before anything is written."""


class SavePeerError(SaveError):
    """A peer did not arrive at an agreement of a save: it died, is stuck, or is too slow."""


class LoadError(CheckpointError):
    """A checkpoint does not hold what was asked for (missing key, other shape, other dtype)."""


class CorruptCheckpointError(LoadError):
    """Bytes of a checkpoint are missing, malformed, or differ from their checksum."""


class DamagedCheckpointWarning(UserWarning):
    """A newer checkpoint is damaged or incomplete and was passed over for an older one."""
