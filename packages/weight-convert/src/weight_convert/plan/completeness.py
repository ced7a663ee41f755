"""Whether every tensor that a rule needs is there, of one shape and dtype, with its companions.

    count, why = expected_experts(catalog, spec)

A conversion of incomplete experts would fill a model with holes, so it is refused, and the message
says which experts of which layer were expected and why so many.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from weight_convert._checks import is_block
from weight_convert.errors import IncompleteExpertsError
from weight_convert.files import Catalog
from weight_convert.specs import FamilySpec, Matcher, Rule, Side

_MAX_LISTED = 8
_FP8 = ("F8_E4M3", "F8_E5M2")


class _Sized(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def expected_experts(catalog: Catalog, spec: FamilySpec) -> tuple[int, str]:
    """The number of experts of a layer and who says so: `config.json`, or else the tensors."""
    config = spec.config_of(catalog.config)
    for name in spec.num_experts_keys:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value, f"{name} of config.json"
    rules = [rule for form in spec.formats.values() for rule in form.rules]
    matcher = Matcher([rule.source for rule in rules], spec.companions)
    members = (matcher.find(key) for key in catalog.tensors)
    numbers = [
        1 + member.expert
        for member in members
        if member is not None and "expert" in rules[member.side].source.chosen_by
    ]
    fused = Matcher([Side(names=(name,), groups=()) for name in spec.experts])
    numbers += [
        tensor.shape[0]
        for key, tensor in catalog.tensors.items()
        if tensor.shape and fused.find(key) is not None
    ]
    return max(numbers, default=0), "the largest number found in any layer"


def check_numbers(
    rule: Rule,
    name: str,
    members: Collection[tuple[int, int]],
    num_experts: int,
    why: str,
) -> None:
    """Raise unless the members are every part of every expert, and no more."""
    has_experts = "expert" in rule.source.chosen_by
    expected = num_experts if has_experts else 1
    for part, template in enumerate(rule.source.names):
        found = {expert for expert, p in members if p == part}
        extra = sorted(expert for expert in found if expert >= expected)
        num_missing = expected - (len(found) - len(extra))
        if not num_missing and not extra:
            continue
        if not has_experts:
            raise IncompleteExpertsError(
                f"{name} is there without {template}, with which it makes one tensor; "
                f"the checkpoint is incomplete"
            )
        # Lazily, because a damaged name may claim expert 10**12.
        missing = islice((n for n in range(expected) if n not in found), _MAX_LISTED)
        raise IncompleteExpertsError(
            f"{template} like {name}: expected experts 0 to {expected - 1} "
            f"({why}); missing {_listed(missing, num_missing)}, "
            f"unexpected {_listed(extra, len(extra))}; "
            f"the checkpoint is incomplete or config.json is of another model"
        )


def check_alike(tensors: Iterable[_Sized]) -> None:
    """Raise unless all tensors of a rule's source have one shape and dtype."""
    every = list(tensors)
    kinds = Counter((tensor.shape, tensor.dtype) for tensor in every)
    ((shape, dtype), _), *_ = kinds.most_common(1)
    for tensor in every:
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise IncompleteExpertsError(
                f"{tensor.key} is {tensor.dtype} {list(tensor.shape)}; expected a tensor like the "
                f"other experts of its layer, {dtype} {list(shape)}"
            )


def check_packed(
    rule: Rule, members: Mapping[tuple[int, int], _Sized], sizes: Mapping[str, int]
) -> None:
    """Raise unless the parts of a packed tensor have its other dims, its dtype and their rows."""
    (_, number), first = next(iter(members.items()))
    back = rule.inverse()
    for (_, part), tensor in members.items():
        expected = back.shape(sizes, part) if len(members) > 1 else tensor.shape
        if (tensor.shape, tensor.dtype) != (expected, first.dtype):
            raise IncompleteExpertsError(
                f"{tensor.key} is {tensor.dtype} {list(tensor.shape)}; expected {first.dtype} "
                f"{list(expected)}, by the heads of config.json and {rule.source.names[number]}"
            )


def check_complete(catalog: Catalog, spec: FamilySpec, tensors: Sequence[_Sized]) -> None:
    """Raise unless the tensors in memory are a whole MoE model's.

    Raises:
        IncompleteExpertsError: a layer has a router but not its experts, a fused tensor has
            another number of experts, block scales are missing or do not fit into the fused form.
    """
    by_key = {tensor.key: tensor for tensor in tensors}
    experts = Matcher([Side(names=(name,), groups=()) for name in spec.experts], spec.companions)
    routers = Matcher([Side(names=(spec.router,), groups=())])
    count, why = expected_experts(catalog, spec)
    made = {
        name for form in spec.formats.values() for rule in form.rules for name in rule.target.names
    }
    needed = set(spec.experts) & made
    if needed and not any(experts.find(key) is not None for key in by_key):
        raise IncompleteExpertsError(
            f"{catalog.directory} has no expert tensor of family {spec.model_type}; "
            f"is it a model of this family, with weights under transformers' names?"
        )
    for key, tensor in by_key.items():
        router, expert = routers.find(key), experts.find(key)
        if expert is not None and tensor.shape[:1] != (count,):
            raise IncompleteExpertsError(
                f"{key} has shape {list(tensor.shape)}, expected {count} experts ({why})"
            )
        if router is not None:
            for name in sorted(needed):
                missing = name.format(**dict(router.places))
                if missing not in by_key:
                    raise IncompleteExpertsError(
                        f"{missing} is missing, expected experts 0 to {count - 1} ({why}) beside "
                        f"the router {key}; the checkpoint is incomplete"
                    )
        if expert is not None and not expert.suffix:
            _check_scales(catalog, spec, tensor, by_key)


def _check_scales(
    catalog: Catalog, spec: FamilySpec, tensor: _Sized, by_key: Mapping[str, _Sized]
) -> None:
    """Raise unless a fused fp8 tensor has its scales, and their blocks end where parts do."""
    quantisation = catalog.config.get("quantization_config")
    block = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    if not block or tensor.dtype not in _FP8 or not spec.companions:
        return
    if not is_block(block):
        raise IncompleteExpertsError(
            f"{catalog.directory}/config.json has weight_block_size {block!r}, but {tensor.key} is "
            f"{tensor.dtype}; expected rows and columns of a block, such as [128, 128]"
        )
    name = tensor.key + spec.companions[0]
    scales = by_key.get(name)
    if scales is None:
        raise IncompleteExpertsError(
            f"{tensor.key} is {tensor.dtype} in blocks of {block} (config.json) but {name} is "
            f"missing; the checkpoint is incomplete"
        )
    rows = [-(-length // size) for length, size in zip(tensor.shape[1:], block, strict=False)]
    if list(scales.shape[1:]) != rows:
        raise IncompleteExpertsError(
            f"{name} has shape {list(scales.shape)}, expected {[*scales.shape[:1], *rows]}: "
            f"{list(tensor.shape)} in blocks of {block} (config.json). Where a block would hold "
            f"rows of two parts, fp8 experts cannot be fused; dequantise them first"
        )


def unmapped_keys(tensors: Sequence[_Sized], spec: FamilySpec, source: str) -> list[str]:
    """The tensors in memory that are of single experts: no rule of the format names them."""
    matcher = Matcher([rule.source for rule in spec.format(source).rules], spec.companions)
    return [tensor.key for tensor in tensors if matcher.is_of_one_expert(tensor.key)]


def _listed(numbers: Iterable[int], total: int) -> str:
    """Return the first of `total` numbers as text."""
    shown = ", ".join(str(number) for number in islice(numbers, _MAX_LISTED))
    return f"{shown} and {total - _MAX_LISTED} more" if total > _MAX_LISTED else shown or "none"
