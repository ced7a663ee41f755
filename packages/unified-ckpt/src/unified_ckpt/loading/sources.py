"""Where each wanted tensor is read from: its own key and part, or what options say stands for it.

A want may be read from the key that it is tied to, a model's weight from the master weights (saved
with `skip_save_model_weight`), and a master weight from the model's (`master_weight_compatible`).

    sources = Sources(checkpoint, LoadOptions())
    sources.find("model", "lm_head.weight")  # Source(part="model", key="embed.weight", cast=False)
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from unified_ckpt.errors import CorruptCheckpointError, LoadError, StoreError
from unified_ckpt.geometry.tensors import StoredDtype, dtype_of
from unified_ckpt.loading.dcp_keys import DCP_NAME, DcpRecord, Prefixes
from unified_ckpt.loading.optimizer_memory import StoredStates
from unified_ckpt.loading.part_index import PartIndex
from unified_ckpt.options import MASTER_WEIGHTS, MODEL, LoadOptions
from unified_ckpt.plans import SplitTensor, StoredTensor
from unified_ckpt.plans.checkpoint import Checkpoint
from unified_ckpt.saving import STATE_NAME, STATE_VERSION
from unified_ckpt.state import StoredValues
from unified_ckpt.state.naming import Names
from unified_ckpt.state.optimizer import MASTER_FIELD


class Source(NamedTuple):
    """A stored tensor that stands for a want; `cast` says that its dtype may differ."""

    part: str
    key: str
    cast: bool


class Sources:
    """Looks wants up in a checkpoint.

    Attributes:
        values: Python values of the checkpoint by dotted path.
        structure: nodes of nested states by dotted path.
        stateless: by part, keys of parameters of which an optimizer had no state; None if the
            checkpoint does not say it.
        taken: by part, stored keys that jobs read.
    """

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self.taken: dict[str, set[str]] = {}
        self._indexes: dict[str, PartIndex | None] = {}
        self._candidates: dict[str, list[tuple[str, bool, PartIndex]]] = {}
        self._master_dtypes: dict[str, StoredDtype] | None = None
        content = _read_state_file(checkpoint)
        typed = content.get("version", 2) >= STATE_VERSION
        self.values = StoredValues(content.get("values", {}), typed=typed)
        self.structure: Mapping[str, Any] = content.get("structure", {})
        self.stateless: Mapping[str, Any] | None = content.get("stateless", {}) if typed else None
        self._dcp_keys: dict[str, dict[str, str]] = {}
        self._names: dict[str, Names] = {}
        self._stateless_names: dict[str, Names] = {}
        if checkpoint.holds(DCP_NAME):  # the values that DCP's adapter keeps
            record = read_dcp_record(checkpoint)
            self._dcp_keys = record.optimizer_keys()
            self.stateless = None
            if not self.values.encoded:
                self.values = StoredValues(record.values(Prefixes()), typed=record.typed)
        self._tied = {**content.get("tied", {}), **options.tied}
        self._skipped_model = bool(content.get("skip_save_model_weight", False))

    def index(self, part: str) -> PartIndex:
        """Return the index of a part."""
        found = self._index_if_any(part)
        return found if found is not None else PartIndex(self._checkpoint, part)

    def has_part(self, part: str) -> bool:
        """Whether the checkpoint holds a part."""
        return self._index_if_any(part) is not None

    def find(self, part: str, key: str) -> Source | None:
        """Return what stands for a tensor of a part, None if nothing does."""
        candidates = self._candidates.get(part)
        if candidates is None:
            candidates = self._candidates[part] = [
                (source, cast, index)
                for source, cast in self._parts_for(part)
                if (index := self._index_if_any(source)) is not None
            ]
        for source, cast, index in candidates:
            if key in index:
                return Source(source, key, cast)
            for wanted in (key, self._tied_key(key)):
                known = None if wanted is None else self._stored_key(source, index, wanted)
                if known is not None:
                    return Source(source, known, cast)
        return None

    def _stored_key(self, part: str, index: PartIndex, key: str) -> str | None:
        """Return a key, the one that differs from it by wrappers' names, or DCP's, if stored."""
        if key in index:
            return key
        dcp_keys = self._dcp_keys.get(part, {})
        if part not in self._names:
            self._names[part] = Names([*dcp_keys, *index.tensor_keys()])
        known = self._names[part].find(key)
        return known if known is None else dcp_keys.get(known, known)

    def state_keys(self, part: str) -> list[str]:
        """Return the keys of all optimizer states of a part, tensors and values: `w/moment1`."""
        index = self._index_if_any(part)
        dcp_keys = self._dcp_keys.get(part, {})
        tensors = [] if index is None else [*dcp_keys, *index.tensor_keys()]
        paths = [*self.values.encoded, *self.structure]
        values = [path.removeprefix(f"{part}.") for path in paths if path.startswith(f"{part}.")]
        return [key for key in (*tensors, *values) if "/" in key]

    def state_name(self, stored: Names, key: str) -> str | None:
        """Return the name among the stored ones that a parameter's states are found under."""
        names = [key, self._tied_key(key)]
        found = [known for name in names if name and (known := stored.find(name)) is not None]
        return found[0] if found else None

    def is_stateless(self, part: str, key: str) -> bool:
        """Whether an optimizer had no state of a parameter when it was saved."""
        if self.stateless is None or part not in self.stateless:
            return False
        if part not in self._stateless_names:
            self._stateless_names[part] = Names(self.stateless[part])
        return self._stateless_names[part].find(key) is not None

    def has_source(self, part: str) -> bool:
        """Whether the checkpoint holds a part, or one that stands for it."""
        return any(self.has_part(source) for source, _ in self._parts_for(part))

    def states_of(self, part: str, prefix: str) -> StoredStates:
        """Return what the checkpoint holds of an optimizer, whose keys begin with `prefix`."""
        tensors: dict[str, StoredTensor | SplitTensor] = {}
        if self.has_part(part):
            index = self.index(part)
            stored_key = {key: key for key in index.tensor_keys()} | self._dcp_keys.get(part, {})
            wanted = sorted(key for key in stored_key if key.startswith(prefix))
            stored = index.resolve(stored_key[key] for key in wanted)
            tensors = {key.removeprefix(prefix): stored[stored_key[key]] for key in wanted}
        start = f"{part}.{prefix}"
        found, name = self.values.get(f"{start}{MASTER_FIELD}")
        return StoredStates(
            tensors=tensors,
            values=[p.removeprefix(start) for p in self.values.encoded if p.startswith(start)],
            structures=[p.removeprefix(start) for p in self.structure if p.startswith(start)],
            master_name=name if isinstance(name, str) and found else None,
            master_dtype=self._master_dtype,
        )

    def _master_dtype(self, key: str) -> torch.dtype | None:
        source = self.find(MASTER_WEIGHTS, key)
        if source is None:
            return None
        if source.part == MODEL:
            return torch.float32
        if self._master_dtypes is None:
            index = self.index(MASTER_WEIGHTS)
            stored = index.resolve(index.tensor_keys())
            self._master_dtypes = {key: dtype_of(each.dtype) for key, each in stored.items()}
        return self._master_dtypes[source.key].torch_dtype

    def _parts_for(self, part: str) -> list[tuple[str, bool]]:
        if part == MASTER_WEIGHTS and self._options.remove_master_weight:
            return [(MODEL, True)]
        if part == MASTER_WEIGHTS and self._options.master_weight_compatible:
            return [(part, False), (MODEL, True)]
        if part == MODEL and self._skipped_model:
            return [(part, False), (MASTER_WEIGHTS, True)]
        return [(part, False)]

    def _tied_key(self, key: str) -> str | None:
        if not self._tied:
            return None
        parameter, slash, state = key.partition("/")
        stored = self._tied.get(parameter)
        return None if stored is None else f"{stored}{slash}{state}"

    def _index_if_any(self, part: str) -> PartIndex | None:
        if part not in self._indexes:
            try:
                self._indexes[part] = PartIndex(self._checkpoint, part)
            except (CorruptCheckpointError, StoreError):  # the part may be there all the same
                raise
            except LoadError:
                self._indexes[part] = None
        return self._indexes[part]


def read_dcp_record(checkpoint: Checkpoint) -> DcpRecord:
    """Return what `dcp.json` says."""
    try:
        return DcpRecord.from_bytes(checkpoint.read_file(DCP_NAME))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{checkpoint.folder / DCP_NAME}: {error}") from error


def read_values(checkpoint: Checkpoint) -> StoredValues:
    """Return the Python values of a checkpoint."""
    return Sources(checkpoint, LoadOptions()).values


def _read_state_file(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the contents of `unified_ckpt.json`, empty if there is none."""
    path = checkpoint.folder / STATE_NAME
    if not checkpoint.holds(STATE_NAME):
        return {}
    try:
        content = json.loads(checkpoint.read_file(STATE_NAME))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not JSON: {error}") from error
    tables = ("values", "tied", "structure", "stateless")
    if not isinstance(content, dict) or not all(
        isinstance(content.get(name, {}), dict) for name in tables
    ):
        raise CorruptCheckpointError(f"{path}: {', '.join(tables)} must be objects")
    return content
