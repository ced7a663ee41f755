"""The adapter that leads from one model to another: what fine-tuning changed, at a low rank.

    extract_lora("Qwen3-30B-A3B", "my-finetuned", "my-lora", rank=16)

Each matrix that differs becomes the best product of that rank, by its singular values; what is no
matrix of a linear layer (norms, routers, embeddings) is stored whole, as peft's `modules_to_save`.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from weight_convert._checks import check_kind, checked_path
from weight_convert.adapters.adapter import CONFIG_NAME, PREFIX, WEIGHTS_NAME
from weight_convert.adapters.lora import are_transposed, checked_weight
from weight_convert.errors import WeightConvertError
from weight_convert.files import Catalog, read_catalog
from weight_convert.operations import Factorise
from weight_convert.outputs import Computations, FilePlan, PlannedTensor, lay_out, natural_key
from weight_convert.plan import spec_of, stored_roles
from weight_convert.run import OutputOptions, Progress, Report, begin, carry_out
from weight_convert.staging import OpenFiles

_STEP_BYTES = 1 << 20
_NO_LINEAR = frozenset({"vocab", "router", "norm", "other", "buffer"})


def extract_lora(
    base: Path | str,
    tuned: Path | str,
    dst: Path | str,
    *,
    rank: int,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Write the new directory `dst`: the adapter, in peft's files, that makes `tuned` of `base`.

    Matrices of linear layers and fused experts that differ become factors in float32; one that
    factors of this rank would not make smaller, and every other tensor, is stored whole. peft
    loads adapters of models in the format `fused`. One matrix at a time is in memory.

    Args:
        base: the model before.
        tuned: the model afterwards; the same tensors.
        dst: the adapter; must not exist.
        rank: of the factors, 1 or more.
        options: how to write; None for the defaults. An adapter is one file, whatever the limit.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        What was written.

    Raises:
        WeightConvertError: the models have other tensors or shapes, nothing differs, quantised
            weights, or a rank that fits no factors of fused experts.
        TargetExistsError, CorruptFileError, OSError: as `convert`.
    """
    target = checked_path(dst)
    options = options if options is not None else OutputOptions()
    _check_arguments(rank, options)
    before, after = read_catalog(base), read_catalog(tuned)
    how = options.of_job
    if not options.dry_run:
        former = begin(before.directory, target, how)
        if isinstance(former, Report):
            return former
    plan = _Extraction(before, after, rank).plan(str(base))
    report = Report(
        dst=target,
        source_format="",
        to="",
        is_experimental=False,
        dry_run=options.dry_run,
        files=plan.output_files(),
        num_source_tensors=len(after.tensors),
        num_tensors=len(plan.targets[0].keys),
        num_regrouped=0,
        data_bytes=plan.data_bytes,
        copied_bytes=plan.targets[0].size_bytes,
        left_out=(),
        unknown_keys=(),
        num_computed=plan.num_computed,
    )
    return carry_out(plan, report, before.directory, how, on_progress)


def _check_arguments(rank: int, options: OutputOptions) -> None:
    check_kind(options, OutputOptions, "options must be OutputOptions")
    check_kind(rank, int, "rank must be an int")
    if rank < 1:
        raise WeightConvertError(f"rank={rank}; expected at least 1")


class _Extraction:
    """The plan of one adapter while it grows."""

    def __init__(self, before: Catalog, after: Catalog, rank: int) -> None:
        self._before, self._after, self._rank = before, after, rank
        self._sources = tuple(
            str(model.directory.absolute() / name)
            for model in (before, after)
            for name in model.files
        )
        family = spec_of(after, None)
        self._experts = family.experts
        self._roles = stored_roles(after, family)
        self._work = Computations(num_sources=len(self._sources))
        self._tensors: list[PlannedTensor] = []
        self._config: dict[str, list[str]] = defaultdict(list)

    def plan(self, base: str) -> FilePlan:
        """All that is written; `base` is what the adapter says that it belongs to."""
        experts: dict[str, list[str]] = defaultdict(list)
        for key in sorted(_differing(self._before, self._after), key=natural_key):
            module, _, name = key.rpartition(".")
            if self._roles.get(key, ("", ""))[1] in self._experts:
                experts[module].append(key)
            elif name == "weight" and self._is_smaller(key):
                self._config["target_modules"].append(module)
                self._factorise(key, module)
            else:
                self._keep(key, module)
        for module, keys in experts.items():
            self._add_experts(module, keys)
        self._refuse_both()
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": base,
            "r": self._rank,
            "lora_alpha": self._rank,
            "bias": "none",
            "inference_mode": True,
            **self._config,
        }
        tensors = self._tensors
        return FilePlan(
            sources=self._sources,
            computed=tuple(self._work.all),
            targets=(lay_out(WEIGHTS_NAME, tensors, {"format": "pt"}),),
            index=None,
            carried=(),
            written=((CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode()),),
            data_bytes=sum(tensor.size_bytes for tensor in tensors),
            num_computed=self._work.count(tensors),
        )

    def _is_smaller(self, key: str) -> bool:
        """Whether it is a linear layer's matrix, and larger than its factors."""
        shape = self._after.tensors[key].shape
        return (
            len(shape) == 2
            and self._roles.get(key, ("", ""))[0] not in _NO_LINEAR
            and self._rank * sum(shape) < shape[0] * shape[1]
        )

    def _factorise(
        self, key: str, module: str, num_experts: int = 0, is_transposed: bool = False
    ) -> None:
        """Add both factors of a matrix, which are computed as one and stand side by side."""
        pair = [checked_weight(model.tensors[key]) for model in (self._before, self._after)]
        rows, columns = pair[1].shape[-2:]
        out, into = (columns, rows) if is_transposed else (rows, columns)
        height = self._rank * (num_experts or 1)
        both = self._work.add(
            Factorise(rank=self._rank, num_experts=num_experts, is_transposed=is_transposed),
            [PlannedTensor.of(pair[0]), PlannedTensor.of(pair[1]).behind(len(self._before.files))],
            key=key,
            dtype="F32",
            shape=(height * (into + out),),
        )
        sizes = {"A": (height, into), "B": (out, height)}
        done_bytes = 0
        for part, shape in sizes.items():
            size_bytes = 4 * shape[0] * shape[1]
            name = f"{PREFIX}{module}.lora_{part}.weight"
            made = replace(both, key=name, shape=shape)
            self._tensors.append(made.made_of(list(both.cut(done_bytes, size_bytes))))
            done_bytes += size_bytes

    def _add_experts(self, module: str, keys: list[str]) -> None:
        """peft wraps the parameters of one module around each other, the last one outermost."""
        is_transposed = are_transposed(self._after)
        for depth, key in enumerate(reversed(sorted(keys, key=self._place))):
            num_experts, *shape = self._after.tensors[key].shape
            if self._rank > min(shape):
                raise WeightConvertError(
                    f"rank={self._rank} is more than the experts of {key} can have "
                    f"({shape[0]} x {shape[1]}); choose {min(shape)} or less"
                )
            self._config["target_parameters"].append(key)
            self._factorise(key, module + ".base_layer" * depth, num_experts, is_transposed)

    def _place(self, key: str) -> int:
        """Where transformers' module declares a fused tensor: as the family's spec lists them."""
        ends = [name.rpartition(".")[2] for name in self._experts]
        name = key.rpartition(".")[2]
        return ends.index(name) if name in ends else len(ends)

    def _keep(self, key: str, module: str) -> None:
        """Store a tensor whole, and with it those that its module has beside it, as peft loads."""
        if module in self._config["modules_to_save"]:
            return
        self._config["modules_to_save"].append(module)
        for other, tensor in self._after.tensors.items():
            if other.rpartition(".")[0] == module:
                whole = PlannedTensor.of(tensor).behind(len(self._before.files))
                self._tensors.append(replace(whole, key=PREFIX + other))

    def _refuse_both(self) -> None:
        """Raise where a module would have factors and be stored whole, too."""
        factored = set(self._config["target_modules"])
        factored |= {key.rpartition(".")[0] for key in self._config["target_parameters"]}
        both = sorted(factored & set(self._config["modules_to_save"]))
        if both:
            raise WeightConvertError(
                f"{both[0]} differs in its matrix and in another tensor, such as its bias, which "
                f"factors of a matrix cannot hold; keep that tensor as the base has it"
            )


def _differing(before: Catalog, after: Catalog) -> Iterator[str]:
    """The tensors whose bytes or dtypes differ; raise where tensors, shapes or nothing do."""
    one_sided = sorted(before.tensors.keys() ^ after.tensors.keys())
    if one_sided:
        there = before if one_sided[0] in before.tensors else after
        raise WeightConvertError(
            f"only {there.directory} has {one_sided[0]}; the two models must have the same "
            f"tensors: convert one into the format of the other first (convert --to)"
        )
    found = False
    paths = [[model.directory / name for name in model.files] for model in (before, after)]
    with OpenFiles(paths[0]) as old, OpenFiles(paths[1]) as new:
        for key, tensor in after.tensors.items():
            other = before.tensors[key]
            if other.shape != tensor.shape:
                raise WeightConvertError(
                    f"{key} is {list(other.shape)} in {before.directory} and "
                    f"{list(tensor.shape)} in {after.directory}; an adapter changes no shapes"
                )
            pair = (PlannedTensor.of(other), old), (PlannedTensor.of(tensor), new)
            if other.dtype != tensor.dtype or any(
                a != b for a, b in zip_longest(*(_steps(*one) for one in pair))
            ):
                found = True
                yield key
    if not found:
        raise WeightConvertError(
            f"{before.directory} and {after.directory} hold the same bytes; nothing to extract"
        )


def _steps(tensor: PlannedTensor, files: OpenFiles) -> Iterator[bytes]:
    for first in range(0, tensor.size_bytes, _STEP_BYTES):
        count = min(_STEP_BYTES, tensor.size_bytes - first)
        yield b"".join(tensor.read(first, count, files))
