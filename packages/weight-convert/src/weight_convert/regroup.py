"""Which source bytes make up each tensor of the output: fusing and splitting as pure data.

A fused tensor is its experts' bytes one after the other, so both directions only reorder byte
ranges. `fuse_experts` and `split_experts` say which; nothing is read or computed here.

Invariant: the pieces of the returned tensors cover every byte of every source tensor exactly
once, and a tensor outside the family's expert names keeps its key, dtype, shape and bytes.

    check_experts(catalog, spec)          # complete, of one shape, not stored twice
    tensors = fuse_experts(catalog, spec)
    tensors[0].key, tensors[0].pieces
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from weight_convert.catalog import Catalog, SourceTensor
from weight_convert.errors import IncompleteExpertsError
from weight_convert.families import ExpertPlace, FamilySpec, FusedExperts
from weight_convert.header import tensor_size_bytes

_MAX_LISTED = 8
_NaturalKey = tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A byte range of a source file; `file` indexes `Catalog.files`."""

    file: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTensor:
    """One tensor of the output, made of `pieces` in order; `order` sorts tensors over the files."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    order: tuple[_NaturalKey, int, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return sum(piece.size_bytes for piece in self.pieces)


StoredExperts = Mapping[str, Mapping[tuple[int, int], SourceTensor]]
FusedTensors = Mapping[str, SourceTensor]


@lru_cache(maxsize=1024)  # the experts of a projection share one key object: time and memory
def natural_key(key: str) -> _NaturalKey:
    """Return a sort key under which `layers.2` precedes `layers.10`, as in transformers."""
    fields: list[tuple[int, str, int]] = []
    for field in key.split("."):
        stem = field.rstrip("0123456789") if len(field) < 1000 else field  # int() has a limit
        digits = field[len(stem) :]
        fields.append((1 if stem else 0, stem, int(digits) if digits else -1))
    return tuple(fields)


def split_experts(catalog: Catalog, spec: FamilySpec) -> list[TargetTensor]:
    """Return the tensors of the per-expert form, each a single piece of a source file.

    Raises:
        IncompleteExpertsError: a fused tensor is not `[E, P*h, d]`, or a tensor has both forms.
    """
    return _unique(
        target for tensor in catalog.tensors.values() for target in _split_one(tensor, spec)
    )


def fuse_experts(catalog: Catalog, spec: FamilySpec) -> list[TargetTensor]:
    """Return the tensors of the fused form; the catalog has passed `check_experts`.

    Raises:
        IncompleteExpertsError: a tensor exists in both forms.
    """
    groups: dict[str, dict[tuple[int, int], SourceTensor]] = defaultdict(dict)
    targets: list[TargetTensor] = []
    for tensor in catalog.tensors.values():
        place = spec.locate(tensor.key)
        if place is None:
            targets.append(_carry(tensor))
        else:
            groups[place.fused_key][place.expert, place.part] = tensor
    for key, members in groups.items():
        parts = [members[place] for place in sorted(members)]
        num_experts = 1 + max(expert for expert, _ in members)
        rows = parts[0].shape[0] * (len(parts) // num_experts)
        targets.append(
            TargetTensor(
                key=key,
                dtype=parts[0].dtype,
                shape=(num_experts, rows, *parts[0].shape[1:]),
                pieces=tuple(_piece(part) for part in parts),
                order=(natural_key(key), 0, 0),
            )
        )
    return _unique(targets)


def collect_experts(
    catalog: Catalog, spec: FamilySpec
) -> tuple[StoredExperts, FusedTensors, frozenset[str]]:
    """Return the per-expert tensors by fused key, the fused tensors by key, and all MoE layers."""
    stored: dict[str, dict[tuple[int, int], SourceTensor]] = defaultdict(dict)
    fused: dict[str, SourceTensor] = {}
    layers: set[str | None] = set()
    for key, tensor in catalog.tensors.items():
        layers.add(spec.router_layer(key))
        place = spec.locate(key)
        if place is not None:
            layers.add(place.layer)
            stored[place.fused_key][place.expert, place.part] = tensor
        found = spec.fused_group(key)
        if found is not None:
            layers.add(found[0])
            fused[key] = tensor
    return stored, fused, frozenset(layer for layer in layers if layer is not None)


def check_experts(catalog: Catalog, spec: FamilySpec) -> None:
    """Raise unless every MoE layer has all its experts, in one form, with one shape and dtype.

    The number of experts is taken from `config.json`; without it, it is the largest that any layer
    has. A layer with a router must have experts.

    Raises:
        IncompleteExpertsError: names the layer, the experts or parts, and what was expected.
    """
    stored, fused, layers = collect_experts(catalog, spec)
    if not stored and not fused:
        raise IncompleteExpertsError(
            f"{catalog.directory} has no expert tensor of family {spec.model_type}; "
            f"is it a model of this family, with weights under transformers' names?"
        )
    expected, source = _expected_experts(catalog, spec, stored, fused)
    for layer in sorted(layers, key=natural_key):
        for group in spec.experts:
            name = group.fused.format(layer=layer)
            members = stored.get(name, {})
            if name in fused:
                if members:
                    raise IncompleteExpertsError(
                        f"{name} is stored both fused and per expert; remove one of the two"
                    )
                _check_fused(fused[name], spec, expected, source)
            else:
                _check_numbers(layer, group, members, expected, source)
                _check_alike(list(members.values()))


def unmapped_expert_keys(catalog: Catalog, spec: FamilySpec) -> list[str]:
    """Return keys that belong to one expert but have no place in a fused tensor, sorted."""
    found = [key for key in catalog.tensors if spec.is_unmapped_expert(key)]
    return sorted(found, key=natural_key)


def _expected_experts(
    catalog: Catalog, spec: FamilySpec, stored: StoredExperts, fused: FusedTensors
) -> tuple[int, str]:
    """Return the number of experts that every layer must have, and who says so."""
    for name in spec.num_experts_keys:
        value = catalog.config.get(name)
        if type(value) is int and value > 0:
            return value, f"{name} of config.json"
    counts = [1 + expert for members in stored.values() for expert, _ in members]
    counts += [tensor.shape[0] for tensor in fused.values() if tensor.shape]
    return max(counts, default=0), "the largest number found in any layer"


def _check_fused(tensor: SourceTensor, spec: FamilySpec, expected: int, source: str) -> None:
    """Raise unless a fused tensor can be split into `expected` experts."""
    try:
        spec.stored_views(tensor.key, tensor.shape)
    except ValueError as error:
        raise IncompleteExpertsError(str(error)) from error
    if tensor.shape[0] != expected:
        raise IncompleteExpertsError(
            f"{tensor.key} has {tensor.shape[0]} experts, expected {expected} ({source})"
        )


def _check_numbers(
    layer: str,
    group: FusedExperts,
    members: Mapping[tuple[int, int], SourceTensor],
    expected: int,
    source: str,
) -> None:
    """Raise unless the members are exactly experts 0..expected-1 with every part."""
    for part, template in enumerate(group.parts):
        found = {expert for expert, p in members if p == part}
        extra = sorted(expert for expert in found if expert >= expected)
        num_missing = expected - (len(found) - len(extra))
        if num_missing or extra:
            # Lazily, because a damaged name may claim expert 10**12.
            missing = islice((n for n in range(expected) if n not in found), _MAX_LISTED)
            raise IncompleteExpertsError(
                f"{template.format(layer=layer, expert='*')}: expected experts 0 to {expected - 1} "
                f"({source}); missing {_listed(missing, num_missing)}, "
                f"unexpected {_listed(extra, len(extra))}; "
                f"the checkpoint is incomplete or config.json is of another model"
            )


def _check_alike(tensors: Sequence[SourceTensor]) -> None:
    """Raise unless all tensors of a fused one are matrices of one shape and dtype."""
    kinds = Counter((tensor.shape, tensor.dtype) for tensor in tensors)
    ((shape, dtype), _), *_ = kinds.most_common(1)
    for tensor in tensors:
        if (tensor.shape, tensor.dtype) != (shape, dtype) or len(tensor.shape) != 2:
            raise IncompleteExpertsError(
                f"{tensor.key} is {tensor.dtype} {list(tensor.shape)}; expected a matrix like the "
                f"other experts of its layer, {dtype} {list(shape)}"
            )


def _listed(numbers: Iterable[int], total: int) -> str:
    """Return the first of `total` numbers as text."""
    shown = ", ".join(str(number) for number in islice(numbers, _MAX_LISTED))
    return f"{shown} and {total - _MAX_LISTED} more" if total > _MAX_LISTED else shown or "none"


def _split_one(tensor: SourceTensor, spec: FamilySpec) -> Iterator[TargetTensor]:
    """Yield the per-expert tensors of one source tensor; itself when it is not a fused one."""
    if spec.fused_group(tensor.key) is None:
        yield _carry(tensor, spec.locate(tensor.key))
        return
    try:
        views = spec.stored_views(tensor.key, tensor.shape)
    except ValueError as error:
        raise IncompleteExpertsError(str(error)) from error
    begin = tensor.offset_bytes
    for view in views:  # in memory order and gapless, so each starts where the last one ended
        try:
            size_bytes = tensor_size_bytes(tensor.dtype, view.stored_shape)
        except ValueError as error:
            raise IncompleteExpertsError(f"{tensor.key} cannot be split: {error}") from error
        place = spec.locate(view.key)
        yield TargetTensor(
            key=view.key,
            dtype=tensor.dtype,
            shape=view.stored_shape,
            pieces=(Piece(file=tensor.file, offset_bytes=begin, size_bytes=size_bytes),),
            order=_order(view.key, place),
        )
        begin += size_bytes


def _order(key: str, place: ExpertPlace | None) -> tuple[_NaturalKey, int, int]:
    """Return where a tensor stands among all: experts at their fused one's place, by part."""
    if place is None:
        return natural_key(key), 0, 0
    return natural_key(place.fused_key), place.part, place.expert


def _carry(tensor: SourceTensor, place: ExpertPlace | None = None) -> TargetTensor:
    """Return a source tensor as it is."""
    return TargetTensor(
        key=tensor.key,
        dtype=tensor.dtype,
        shape=tensor.shape,
        pieces=(_piece(tensor),),
        order=_order(tensor.key, place),
    )


def _piece(tensor: SourceTensor) -> Piece:
    """Return the whole of a source tensor as one piece."""
    return Piece(file=tensor.file, offset_bytes=tensor.offset_bytes, size_bytes=tensor.size_bytes)


def _unique(targets: Iterable[TargetTensor]) -> list[TargetTensor]:
    """Return the targets, or raise when two of them have the same key."""
    by_key: dict[str, TargetTensor] = {}
    for target in targets:
        if by_key.setdefault(target.key, target) is not target:
            raise IncompleteExpertsError(
                f"{target.key} is stored both fused and per expert; remove one of the two"
            )
    return list(by_key.values())
