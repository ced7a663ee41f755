"""A dense model as a Mixture-of-Experts one that computes the same.

    upcycle("Qwen3-8B", "Qwen3-8B-MoE", Upcycling(num_experts=8, num_experts_per_tok=2))

Each expert is a copy of its layer's MLP (arXiv 2212.05055), or with `num_shards` a part of its
units (arXiv 2410.07524): expert e holds part e % num_shards, and the experts of one copy share a
row of the router, so that they are chosen together. Chosen weights sum to 1, so each part counts
1 / num_shards; the rows of `up_proj` are multiplied by num_shards, which undoes that, to the bit
where it is a power of two. Rows of different copies are drawn at random.

Invariant: all other tensors keep name and bytes; gate rows and down columns are copied.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from weight_convert._checks import Record, check_kind, check_sizes
from weight_convert._dtypes import FLOATS
from weight_convert.errors import WeightConvertError
from weight_convert.files import Catalog, read_catalog, tensor_size_bytes
from weight_convert.operations import Combine, DrawRows
from weight_convert.outputs import Computations, PlannedTensor, Weave, natural_key
from weight_convert.plan import as_stored
from weight_convert.run import Output, OutputOptions, Progress, Report, write_output
from weight_convert.specs import FamilySpec, Matcher, Side, get_spec
from weight_convert.upcycling.configs import family_for, moe_config

_MLP = re.compile(r"(.*layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")
_Parts = Mapping[str, PlannedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling(Record):
    """What becomes of a dense MLP.

    Attributes:
        num_experts: of each layer.
        num_experts_per_tok: chosen for each token; both are multiples of `num_shards`.
        num_shards: parts that an MLP is cut into; 1 copies it.
        seed: of the routers.
        router_std: standard deviation of their numbers.
    """

    num_experts: int
    num_experts_per_tok: int
    num_shards: int = 1
    seed: int = 0
    router_std: float = 0.02

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        check_sizes(self, "num_experts", "num_experts_per_tok", "num_shards")
        if self.num_experts_per_tok > self.num_experts:
            raise WeightConvertError(
                f"num_experts_per_tok={self.num_experts_per_tok} of {self.num_experts} experts; "
                f"choose at most all"
            )
        for name in ("num_experts", "num_experts_per_tok"):
            if getattr(self, name) % self.num_shards:
                raise WeightConvertError(
                    f"{name}={getattr(self, name)} is no multiple of num_shards={self.num_shards}, "
                    f"the experts that together make one copy of an MLP"
                )
        if not self.router_std > 0:
            raise WeightConvertError(f"router_std={self.router_std}; expected above 0")


def upcycle(
    src: Path | str,
    dst: Path | str,
    upcycling: Upcycling,
    *,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Write the dense model `src` as a Mixture-of-Experts one into the new directory `dst`.

    Qwen3 becomes Qwen3-MoE, Llama and Mistral become Mixtral, in the format `transformers`.

    Args:
        src: the dense model.
        dst: the output; must not exist.
        upcycling: how many experts, and of what.
        options: how to write; None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        What was written; `num_computed` counts routers and what is cut or scaled.

    Raises:
        UnknownFamilyError: `config.json` is of no dense family that is known.
        WeightConvertError: an MLP is incomplete, is no multiple of `num_shards`, is quantised, or
            has what the MoE family has not, such as biases.
        TargetExistsError, CorruptFileError, OSError: as `convert`.
    """
    check_kind(upcycling, Upcycling, "upcycling must be an Upcycling")
    catalog = read_catalog(src)
    spec = get_spec(family_for(catalog.config))
    work = Computations(num_sources=len(catalog.files))
    layers: dict[str, dict[str, PlannedTensor]] = defaultdict(dict)
    memory: list[PlannedTensor] = []
    for key, stored in catalog.tensors.items():
        match = _MLP.fullmatch(key)
        if match is not None:
            layers[match[1]][match[2]] = PlannedTensor.of(stored)
        else:
            memory.append(PlannedTensor.of(stored))
    width = _checked_width(catalog, layers, upcycling)
    for layer, parts in layers.items():
        memory += _experts(layer, parts, spec, upcycling, work)
    known = Matcher([Side(names=(name,), groups=()) for name in spec.tensors])
    for tensor in memory:
        if known.find(tensor.key) is None:
            raise WeightConvertError(f"{tensor.key} has no place in a {spec.model_type} model")
    ordered = [replace(tensor, order=(natural_key(tensor.key), 0, 0)) for tensor in memory]
    count, chosen = upcycling.num_experts, upcycling.num_experts_per_tok
    changes = moe_config(catalog.config, experts=count, chosen=chosen, width=width)
    changes |= {"model_type": spec.model_type, "architectures": [spec.architecture]}
    output = Output(
        tensors=as_stored(ordered, spec, "transformers", work, catalog.config),
        work=work,
        sources=catalog.files,
        config=changes,
    )
    return write_output(catalog, output, dst, options=options, on_progress=on_progress)


def _checked_width(catalog: Catalog, layers: Mapping[str, _Parts], upcycling: Upcycling) -> int:
    """Units of an expert, after checking every MLP."""
    if not layers:
        raise WeightConvertError(f"{catalog.directory} has no layers.N.mlp.gate_proj.weight")
    units: set[int] = set()
    for layer, parts in layers.items():
        missing = {"gate", "up", "down"} - parts.keys()
        if missing:
            raise WeightConvertError(f"{layer}.mlp has no {min(missing)}_proj.weight")
        gate, up, down = (parts[name] for name in ("gate", "up", "down"))
        if not (len(gate.shape) == 2 and gate.shape == up.shape == down.shape[::-1]):
            raise WeightConvertError(
                f"{layer}.mlp has gate {list(gate.shape)}, up {list(up.shape)} and down "
                f"{list(down.shape)}; expected [units, hidden] twice, and [hidden, units]"
            )
        if {gate.dtype, up.dtype, down.dtype} - FLOATS:
            raise WeightConvertError(f"{layer}.mlp is {gate.dtype}; dequantise the model first")
        units.add(gate.shape[0])
    if len(units) > 1 or min(units) % upcycling.num_shards:
        raise WeightConvertError(
            f"MLPs of {', '.join(map(str, sorted(units)))} units cannot be cut into "
            f"{upcycling.num_shards} parts of one size; choose a divisor"
        )
    return units.pop() // upcycling.num_shards


def _experts(
    layer: str, parts: _Parts, spec: FamilySpec, upcycling: Upcycling, work: Computations
) -> Iterator[PlannedTensor]:
    """The fused experts of a layer, and its router."""
    gate_up, down = (name.format(layer=layer) for name in spec.experts)
    count, shards = upcycling.num_experts, upcycling.num_shards
    units, hidden = parts["gate"].shape
    width = units // shards
    first, last = parts["gate"], parts["down"]
    rows, columns = list[PlannedTensor](), list[PlannedTensor]()
    for shard in (expert % shards for expert in range(count)):
        rows += [_rows(first, shard, shards), _scaled(parts["up"], shard, shards, work)]
        columns.append(_columns(last, shard, shards, work))
    for key, shape, pieces_of in (
        (gate_up, (count, 2 * width, hidden), rows),
        (down, (count, hidden, width), columns),
    ):
        pieces = [piece for tensor in pieces_of for piece in tensor.pieces]
        yield replace(first, key=key, shape=shape).made_of(pieces)
    router = spec.router.format(layer=layer)
    yield work.add(
        DrawRows(
            seed=zlib.crc32(f"{upcycling.seed} {router}".encode()),
            std=upcycling.router_std,
            copies=shards,
        ),
        (),
        key=router,
        dtype=first.dtype,
        shape=(count, hidden),
    )


def _rows(matrix: PlannedTensor, shard: int, shards: int) -> PlannedTensor:
    """One part of the rows."""
    shape = (matrix.shape[0] // shards, *matrix.shape[1:])
    size = tensor_size_bytes(matrix.dtype, shape)
    return replace(matrix, shape=shape).made_of(tuple(matrix.cut(shard * size, size)))


def _scaled(matrix: PlannedTensor, shard: int, shards: int, work: Computations) -> PlannedTensor:
    """The same times the number of parts."""
    part = _rows(matrix, shard, shards)
    if shards == 1:
        return part
    scaled = Combine(method="linear", weights=(float(shards),))
    return work.add(scaled, (part,), key=part.key, dtype=part.dtype, shape=part.shape)


def _columns(matrix: PlannedTensor, shard: int, shards: int, work: Computations) -> PlannedTensor:
    """One part of the columns."""
    if shards == 1:
        return matrix
    shape = (matrix.shape[0], matrix.shape[1] // shards)
    size = tensor_size_bytes(matrix.dtype, shape[1:])
    run = Weave.Run(input=0, offset_bytes=shard * size, stride_bytes=shards * size, size_bytes=size)
    woven = Weave(num_rows=shape[0], runs=(run,))
    return work.add(woven, (matrix,), key=matrix.key, dtype=matrix.dtype, shape=shape)
