"""What a model family calls its tensors, in memory and in each format on disk.

A `FamilySpec` is read from a TOML file (see `loader`). The names in memory are those of
transformers' modules; the format `fused` is a directory that holds exactly them. Every other
format is a list of rules, so any format of a family leads to any other by way of memory, and
converting, comparing and the checkpoint keys of a trainer all follow from the same rules.

    spec = get_spec("qwen3_moe")
    views = spec.stored_views("model.layers.0.mlp.experts.down_proj", (128, 2048, 768))
    views[3].key      # "model.layers.0.mlp.experts.3.down_proj.weight"
    views[3].offset   # (3, 0, 0)

Invariant: the `stored_views` of a tensor tile it exactly, in the order of its memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from weight_convert._checks import Record, check_kind
from weight_convert._kinds import FileKind
from weight_convert.errors import WeightConvertError
from weight_convert.specs.matching import Matcher, fill
from weight_convert.specs.rules import EXPERT, PART, Rule, Side

FUSED = "fused"
ROLES = ("vocab", "column", "row", "kv", "router", "norm", "other", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredView(Record):
    """One stored tensor as a box of one tensor in memory.

    Attributes:
        key: name of the tensor on disk.
        offset: where the box starts in the tensor in memory, one number per dim of it.
        shape: the box's shape in the tensor in memory (as many dims as `offset`).
        stored_shape: the shape written to disk; as many elements as `shape`, in the same order.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNote(Record):
    """What a spec says of a tensor in memory.

    Attributes:
        role: how ranks of tensor parallelism hold it: `column` and `vocab` are cut along the rows
            of the matrix, `row` along its columns, `kv` as column but whole where there are fewer
            heads than ranks; `router` and `norm` are whole. A `buffer` is no parameter. `other` is
            of another part of the model, such as a vision tower: whole, never quantised, and under
            this name in every format.
        dims: names of its dims; those of one name have one size in all tensors of a model. None
            are said of `other`.
    """

    role: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Record):
    """How a family stands on disk: rules from stored tensors to memory, and whose code shows it.

    Attributes:
        name: of the format; tensors that no rule names are stored as they are in memory.
        rules: each from stored tensors to memory.
        order: in which order tensors are dealt to files: "names", as transformers does where it
            renames tensors, or "modules", that of the spec's list.
        files: the kind of files in which the format is written.
        file_name: of the one file in which all tensors stand; "" for the usual names.
        proof: the project's code that reads such files and the test that runs it; a format
            without one is experimental.
    """

    name: str
    rules: tuple[Rule, ...]
    order: Literal["names", "modules"]
    files: FileKind
    proof: str
    file_name: str = ""

    @property
    def renames_all(self) -> bool:
        """Whether it has names of its own for everything, as it has for the first tensor."""
        return any(
            rule.is_rename and rule.target.names[0].endswith("embed_tokens.weight")
            for rule in self.rules
            if not rule.is_itself
        )

    def inverse(self) -> tuple[Rule, ...]:
        """The rules from memory to stored tensors."""
        return tuple(rule.inverse() for rule in self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec(Record):
    """One family; see the module.

    Attributes:
        model_type: the `model_type` of `config.json`.
        architecture: transformers' class, for `architectures` of `config.json`.
        experts: names in memory of the fused tensors of an MoE layer.
        router: name in memory of the router's weight; a layer that has it must have its experts.
        num_experts_keys: names under which `config.json` may state the number of experts.
        companions: suffixes of tensors that go wherever the tensor of their name goes.
        tensors: every tensor in memory, by its name.
        formats: by name; `fused` is always there.
        decoder_config: the entry of `config.json` that describes the decoder, "" for all of it.
        keep_dtype: parameters that no cast touches, as no load of transformers does; no more does
            one touch a `buffer`.
    """

    model_type: str
    architecture: str
    experts: tuple[str, ...]
    router: str
    num_experts_keys: tuple[str, ...]
    companions: tuple[str, ...]
    tensors: Mapping[str, TensorNote]
    formats: Mapping[str, Format]
    decoder_config: str = ""
    keep_dtype: tuple[str, ...] = ()

    def keeps_dtype(self, name: str) -> bool:
        """Whether a cast leaves the tensor of this name in memory as it is."""
        return self.tensors[name].role == "buffer" or name in self.keep_dtype

    def config_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a `config.json` says of the decoder, which may stand in an entry of it."""
        inner = config.get(self.decoder_config)
        return {**config, **(inner if isinstance(inner, dict) else {})}

    def format(self, name: str) -> Format:
        """The format of this name.

        Raises:
            WeightConvertError: the family has none.
        """
        check_kind(name, str, "a format's name must be a string")
        if name not in self.formats:
            raise WeightConvertError(
                f"{self.model_type} has no format {name!r}; it has {', '.join(self.formats)}"
            )
        return self.formats[name]

    def stored_views(
        self, name: str, shape: tuple[int, ...], format_name: str = "transformers"
    ) -> tuple[StoredView, ...]:
        """How the tensor `name` of `shape` in memory appears on disk, in memory order.

        Args:
            name: name of a parameter or buffer in memory.
            shape: its full shape.
            format_name: which format.

        Returns:
            One view for each stored tensor; the tensor itself where no rule names it.

        Raises:
            WeightConvertError: a shape that the format's rule does not have, or a rule by which
                stored tensors are no boxes of one in memory.
        """
        check_kind(name, str, "a tensor's name must be a string")
        check_kind(shape, tuple, f"the shape of {name} must be a tuple")
        rules = [rule for rule in self.format(format_name).rules if not rule.behind]
        member = _matcher(tuple(rule.target for rule in rules), self.companions).find(name)
        if member is None:
            return (_whole(name, shape),)
        rule = rules[member.side]
        if rule.transposed or rule.is_packed:
            raise WeightConvertError(f"{name} is stored transposed or packed, as no box")
        if rule.is_rename:
            stored = fill(rule.source.names[0], member.places)
            return (_whole(stored + member.suffix, shape),)
        if len(rule.target.names) > 1:
            raise WeightConvertError(f"{name} is stored inside a tensor with others, as no box")
        sizes = rule.inverse().sizes(shape, 0)
        inner = rule.source.shape(sizes)
        return tuple(
            StoredView(
                key=fill(rule.source.names[part], member.places, expert) + member.suffix,
                offset=_offset(rule.target, {EXPERT: expert, PART: part}, sizes),
                shape=_box(rule.target, rule.source.chosen_by, sizes),
                stored_shape=inner,
            )
            for expert, part in rule.inverse().targets(sizes)
        )


@cache
def _matcher(sides: tuple[Side, ...], companions: tuple[str, ...]) -> Matcher:
    return Matcher(sides, companions)


def _whole(key: str, shape: tuple[int, ...]) -> StoredView:
    return StoredView(key=key, offset=(0,) * len(shape), shape=shape, stored_shape=shape)


def _offset(side: Side, chosen: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Where the box begins: the axes that choose a stored tensor stand first in each dim."""
    offset = []
    for group in side.groups:
        stride, begin = 1, 0
        for axis in reversed(group):
            begin += chosen.get(axis, 0) * stride
            stride *= sizes[axis]
        offset.append(begin)
    return tuple(offset)


def _box(side: Side, chosen: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    lengths = []
    for group in side.groups:
        free = [axis for axis in group if axis not in chosen]
        if tuple(free) != group[len(group) - len(free) :]:
            raise WeightConvertError(f"{side.names[0]}: its stored tensors alternate, no boxes")
        length = 1
        for axis in free:
            length *= sizes[axis]
        lengths.append(length)
    return tuple(lengths)
