"""What can be refused from the files alone, before torch is imported: sizes, paths, the run folder.

Invariant: nothing is written that stays, and each rule has its home here; `moe_train.jobs` asks the
same functions again with the decoder as it was really read.

    check_early(config, resuming=False)
"""

import glob
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_alloc import AllocatorConfig, ConfigError
from moe_train.config import PYTHON_STDLIB, Config
from moe_train.errors import MissingFileError, TrainValueError

HOLDS_CHECKPOINTS = (
    "train.output_dir={} already holds checkpoints; pass --resume to continue that run, or choose "
    "another folder"
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder that a layout has to fit; None where a `config.json` has none."""

    num_hidden_layers: int | None
    num_experts: int | None
    num_attention_heads: int | None
    max_position_embeddings: int | None


def check_early(config: Config, *, resuming: bool) -> None:
    """Everything that is refused before torch is imported.

    Args:
        resuming: the run may go on in a folder that holds checkpoints.

    Raises:
        FileNotFoundError: a file or folder that a key names does not exist.
        ValueError: the model does not fit the layout, or the run folder cannot be used.
    """
    check_sizes(config, _read_sizes(config))
    if config.tokenizer.file is not None and not Path(config.tokenizer.file).exists():
        raise MissingFileError(f"tokenizer.file={config.tokenizer.file} does not exist")
    replay = config.moe.replay_routing
    if replay is not None and not any(Path(replay).glob("step-*")):
        raise MissingFileError(
            f"moe.replay_routing={replay} holds no step-*; name a folder that a run with "
            "moe.record_routing has written"
        )
    for source in config.all_sources:
        for entry in source.corpus:
            if entry != PYTHON_STDLIB:
                corpus_matches(entry)
    allocator_settings(config)
    check_run_folders(config.local_folders, resuming=resuming)


def allocator_settings(config: Config) -> AllocatorConfig:
    """The settings with which gpu-alloc serves the job, or would.

    Raises:
        FileNotFoundError: `memory.settings_file` does not exist.
        ValueError: the settings are none; names the key.
    """
    memory = config.memory
    try:
        if memory.settings is not None:
            return AllocatorConfig.parse(memory.settings)
        if memory.settings_file is not None:
            return AllocatorConfig.from_toml(memory.settings_file)
        return AllocatorConfig.from_env()
    except FileNotFoundError as error:
        raise MissingFileError(
            f"memory.settings_file={memory.settings_file} does not exist; write it with "
            "`gpu-alloc tune TRACE -o FILE`"
        ) from error
    except ConfigError as error:
        key = "" if memory.settings is None else "memory.settings: "
        key = key if memory.settings_file is None else "memory.settings_file: "
        raise TrainValueError(f"{key}{error}") from error
    except OSError as error:
        raise TrainValueError(f"memory.settings_file: {error}") from error


def corpus_matches(entry: str) -> list[Path]:
    """The files and folders that an entry of a corpus names, in order.

    Raises:
        FileNotFoundError: it names nothing.
    """
    path = Path(entry).expanduser()
    if path.exists():
        return [path]
    found = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(entry) else []
    if not found:
        raise MissingFileError(
            f"corpus {entry!r} does not exist; name a folder, a file, a glob or {PYTHON_STDLIB!r}"
        )
    return [Path(match) for match in found]


def check_sizes(config: Config, sizes: ModelSizes) -> None:
    """Hold the decoder's sizes and the batch against the layout and the data.

    Raises:
        ValueError: layers, experts, batch or positions do not fit; with the numbers that would.
    """
    parallel, length = config.parallel, config.data.sequence_length
    parallel.check_divides(
        num_hidden_layers=sizes.num_hidden_layers,
        num_experts=sizes.num_experts,
        num_heads=sizes.num_attention_heads,
    )
    config.check_batch()
    positions = sizes.max_position_embeddings
    if positions is not None and length > positions:
        raise TrainValueError(
            f"data.sequence_length={length} exceeds the model's max_position_embeddings="
            f"{positions}; shorten the sequences"
        )


def check_run_folders(folders: Mapping[str, Path], *, resuming: bool) -> None:
    """Whether a run can write into its directories; nothing is made that stays.

    Args:
        folders: by key, as `Config.local_folders`; what a URL names is looked at with torch.
        resuming: there may be checkpoints in `train.output_dir`.

    Raises:
        ValueError: one is a file, cannot be written, or holds the checkpoints of another run.
    """
    for key, folder in folders.items():
        _check_writable(key, folder)
    place = folders.get("train.output_dir")
    if not resuming and place is not None and any(place.glob("checkpoint-*")):
        raise TrainValueError(HOLDS_CHECKPOINTS.format(place))


def _check_writable(key: str, folder: Path) -> None:
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        what = "is a file" if nearest == folder else f"cannot be made, {nearest} is a file"
        raise TrainValueError(f"{key}={folder} {what}; choose another folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        where = "" if nearest == folder else f": {nearest}"
        raise TrainValueError(
            f"{key}={folder} is not writable{where} ({error.strerror}); choose another "
            "folder, or get the right to write there"
        ) from error


def _read_sizes(config: Config) -> ModelSizes:
    """The sizes in the model's `config.json`, as far as they can be had without torch."""
    source = Path(config.model.source)
    key = "model.config_file" if config.model.init_from is None else "model.init_from"
    if not source.exists():
        raise MissingFileError(f"{key}={source} does not exist; name a {_WANTED[key]}")
    file = source / "config.json" if source.is_dir() else source
    if not file.exists():
        raise MissingFileError(f"{key}={source} holds no config.json; name a {_WANTED[key]}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainValueError(f"cannot read the model config {file}: {error}") from error
    if not isinstance(values, dict):
        raise TrainValueError(f"the model config {file} is not a JSON object")
    experts = (values[name] for name in _EXPERTS if values.get(name) is not None)
    return ModelSizes(
        num_hidden_layers=_size(values.get("num_hidden_layers")),
        num_experts=_size(next(experts, None)),
        num_attention_heads=_size(values.get("num_attention_heads")),
        max_position_embeddings=_size(values.get("max_position_embeddings")),
    )


_WANTED = {
    "model.config_file": "config.json as transformers writes it",
    "model.init_from": "folder with config.json and weights, in a format that weight-convert knows",
}


def _size(value: object) -> int | None:
    """`value` if it is a size; else None: the reader of the decoder says what is wrong."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
