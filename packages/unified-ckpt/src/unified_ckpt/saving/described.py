"""What all ranks of a save have described, and the plan that follows: the same on every rank.

Layouts and states that several ranks describe alike are told once. A plan is kept by the digest of
all layouts and nodes: while no rank changes a key, a shape, a box or an option, and all still have
the plan, nothing of the layout is told or planned again.

    described = Described.exchange(agreement, request.describe(), phase.results)
    plan = described.plan()
"""

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.files.format.tables import TABLES_NAME
from unified_ckpt.geometry import Shape
from unified_ckpt.options import MASTER_WEIGHTS, MODEL, OPTIMIZER
from unified_ckpt.plans import SavePlan, plan_save
from unified_ckpt.plans.columns import BoxTable
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.saving.request import STATE_NAME, STATE_VERSION, Description
from unified_ckpt.state import Structures, encode_value
from unified_ckpt.state.optimizer import merge_groups

_MAX_PLANS = 2
_EMPTY: tuple[Any, ...] = (
    [],
    {},
    encode_value((), ""),
)  # what a rank without a part's tensors has in its place


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what else follows from the layouts of all ranks."""

    plan: SavePlan
    options: Mapping[str, Any]
    has_aliases: bool


class PlanMemory:
    """The plans of the last layouts of this process: what `plan_layouts` made, by its arguments."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, Planned] = OrderedDict()
        self._lock = threading.Lock()

    def digests(self) -> list[str]:
        """Return what is remembered."""
        with self._lock:
            return [*self._plans]

    def get(self, digest: str) -> Planned | None:
        """Return a plan, None if it is not remembered."""
        with self._lock:
            return self._plans.get(digest)

    def put(self, digest: str, planned: Planned) -> None:
        """Remember a plan, and forget those used longest ago."""
        with self._lock:
            self._plans[digest] = planned
            self._plans.move_to_end(digest)
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)


PLANS = PlanMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What all ranks have described.

    Attributes:
        summaries: of every rank.
        digest: of all layouts and nodes.
        layouts: of every rank; None if all ranks have the plan.
        states: of every rank, empty where a lower one has the same.
    """

    summaries: Sequence[Mapping[str, Any]]
    digest: str
    layouts: Sequence[bytes] | None
    states: Sequence[Mapping[str, Any]]

    @classmethod
    def exchange(
        cls, agreement: Agreement, mine: Description, summaries: Sequence[Mapping[str, Any]]
    ) -> "Described":
        """Tell the other ranks what they do not know; collective over the agreement's group.

        Args:
            agreement: the ranks.
            mine: this rank's description.
            summaries: of every rank.
        """
        said = json.dumps([[each["layout"], each["node"]] for each in summaries]).encode()
        digest = hashlib.sha256(said).hexdigest()
        layouts = None
        if not all(digest in each["known"] for each in summaries):
            told = _tell(agreement, "layouts", mine.layout, [s["layout"] for s in summaries])
            layouts = [told[each["layout"]] for each in summaries]
        digests = [each["state"] for each in summaries]
        states = {
            d: json.loads(raw) for d, raw in _tell(agreement, "states", mine.state, digests).items()
        }
        return cls(
            summaries=summaries,
            digest=digest,
            layouts=layouts,
            states=[states.pop(each, _NOTHING) for each in digests],
        )

    def plan(self) -> Planned:
        """Return the plan of all ranks.

        Raises:
            CheckpointValueError: what ranks ask for does not go together.
        """
        _check_same("target", [each["target"] for each in self.summaries])
        planned = PLANS.get(self.digest)
        if self.layouts is not None or planned is None:
            planned = plan_layouts(self.layouts or (), [each["node"] for each in self.summaries])
            PLANS.put(self.digest, planned)
        return planned

    def check_names(self, planned: Planned, state_file: bytes) -> None:
        """Refuse files that several would write, or that loads would take for the save's own."""
        names = [MANIFEST_NAME, TABLES_NAME, *planned.plan.names, *planned.plan.index_names]
        names += [STATE_NAME] * bool(state_file)
        names += [name for rank in self.summaries for name, _ in rank["files"]]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise CheckpointValueError(f"several would write {twice}; use different names")
        own = {STATE_NAME}
        for part in planned.plan.columns.table.parts:
            own |= {f"{part}.safetensors", f"{part}.safetensors.index.json"}
        given = [name for rank in self.summaries for name, _ in rank["files"] if name in own]
        if given:
            raise CheckpointValueError(
                f"file {given[0]!r} has a name by which loads find what a save has written, and "
                "they would read it instead; leave it out, or give it another name"
            )

    def blob_bytes(self, state_file: bytes) -> int:
        """Return the bytes of all whole files of all ranks."""
        given: int = sum(num_bytes for rank in self.summaries for _, num_bytes in rank["files"])
        return given + len(state_file)

    def state_file(self, planned: Planned) -> bytes:
        """Return the contents of `unified_ckpt.json`, empty if there is nothing to say.

        Raises:
            CheckpointValueError: ranks have different values in one place.
        """
        held, merged = merge_groups([each["values"] for each in self.states])
        rank_of: dict[str, int] = {}
        for rank, values in enumerate(held):
            for path, value in values.items():
                if path in merged and not _same(merged[path], value):
                    raise CheckpointValueError(
                        f"{path!r} is {merged[path]!r} on rank {rank_of[path]}, {value!r} on rank "
                        f"{rank}; values must be equal, or go into rank_files"
                    )
                merged.setdefault(path, value)
                rank_of.setdefault(path, rank)
        parts = {part for each in self.states for part in each["parts"]}
        stateless = {
            part: sorted({key for each in self.states for key in each["stateless"].get(part, ())})
            for part in sorted(parts)
        }
        content: dict[str, Any] = {
            "values": {
                path: value
                for path, value in sorted(merged.items())
                if path not in parts or value not in _EMPTY
            },
            "structure": Structures.merge([each["structure"] for each in self.states]),
            "stateless": {part: keys for part, keys in stateless.items() if keys},
            "tied": planned.options["tied"] if planned.has_aliases else {},
            "skip_save_model_weight": planned.options["skip_save_model_weight"],
        }
        content = {name: value for name, value in content.items() if value}
        if not content:
            return b""
        table = {"version": STATE_VERSION, **content}
        return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


_NOTHING: Mapping[str, Any] = {"values": {}, "structure": {}, "stateless": {}, "parts": []}


def _tell(agreement: Agreement, name: str, mine: bytes, digests: Sequence[str]) -> dict[str, bytes]:
    """Return every different text of all ranks by digest; the lowest rank that has one tells it."""
    first: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        first.setdefault(digest, rank)
    is_mine = first[digests[agreement.rank]] == agreement.rank
    texts = agreement.gather_bytes(name, mine if is_mine else b"")
    return {digest: texts[rank] for digest, rank in first.items()}


def _check_same(name: str, values: Sequence[Any]) -> None:
    if any(value != values[0] for value in values):
        raise CheckpointValueError(f"ranks disagree about {name}: {values}; pass the same on all")


def plan_layouts(layouts: Sequence[bytes], nodes: Sequence[str]) -> Planned:
    """Plan from every rank's layout (`Description.layout`) and node; pure.

    Raises:
        CheckpointValueError: what ranks ask for does not go together.
    """
    heads: dict[bytes, Mapping[str, Any]] = {}
    of_rank = []
    for layout in layouts:
        text = layout[: layout.index(b"\n")]
        if text not in heads:
            heads[text] = json.loads(text)
        of_rank.append(heads[text])
    options = of_rank[0]["options"]
    if any(head["options"] != options for head in heads.values()):
        _check_same("options", [head["options"] for head in of_rank])
    table = BoxTable.of(layout[layout.index(b"\n") + 1 :] for layout in layouts)
    plan = plan_save(
        table,
        max_shard_bytes=options["max_shard_bytes"],
        kept_sharded=_kept_sharded([*heads.values()], table, options),
        excluded=_excluded(table) if options["skip_save_model_weight"] else None,
        nodes=None if options["files_over_nodes"] else nodes,
    )
    _check_aliases([*heads.values()], table, options["tied"])
    has_aliases = any(head["aliases"] for head in heads.values())
    return Planned(plan=plan, options=options, has_aliases=has_aliases)


def _kept_sharded(
    heads: Sequence[Mapping[str, Any]], table: BoxTable, options: Mapping[str, Any]
) -> dict[str, set[str] | None]:
    """Return the tensors, by part, whose boxes become stored tensors of their own; None for all."""
    if heads[0]["one_writer"]:
        return dict.fromkeys(table.parts)
    parts = (OPTIMIZER, MASTER_WEIGHTS)
    if options["ignore_merge_optimizer"]:
        return dict.fromkeys(parts)
    if options["gather_split_param"]:
        return {}
    return {
        part: {key for head in heads for key in head["flat_keys"].get(part, ())} for part in parts
    }


def _excluded(table: BoxTable) -> dict[str, set[str]]:
    """Return the model's tensors that the master weights hold too."""
    shapes: dict[str, Shape] = table.shapes_of(MASTER_WEIGHTS)
    excluded = set()
    for key, shape in table.shapes_of(MODEL).items():
        if key in shapes:
            if shapes[key] != shape:
                raise CheckpointValueError(
                    f"skip_save_model_weight: {key!r} is {shape} in 'model', "
                    f"but {shapes[key]} in 'master_weights'"
                )
            excluded.add(key)
    return {MODEL: excluded}


def _check_aliases(
    heads: Sequence[Mapping[str, Any]], table: BoxTable, tied: Mapping[str, str]
) -> None:
    for part in sorted({part for head in heads for part in head["aliases"]}):
        keys = table.keys_of(part)
        stored = {*keys, *(key.partition("@")[0] for key in keys)}  # boxes apart, too
        for alias in sorted({key for head in heads for key in head["aliases"].get(part, ())}):
            parameter, slash, state = alias.partition("/")
            if f"{tied[parameter]}{slash}{state}" not in stored:
                raise CheckpointValueError(
                    f"{part} {alias!r} is tied to {tied[parameter]!r}, which no rank holds; name "
                    "the key that is stored"
                )


def _same(a: object, b: object) -> bool:
    """Whether two values have the same JSON, so that NaN equals itself and 1 differs from 1.0."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
