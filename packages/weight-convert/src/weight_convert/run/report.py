"""What a job did, or with `dry_run` will do.

report.files, report.total_bytes
"""

from dataclasses import dataclass
from pathlib import Path

from weight_convert._checks import Record
from weight_convert.files import LeftOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Record):
    """What a conversion did, or with `dry_run` will do; the sizes are exact in both cases.

    Attributes:
        dst: the output directory.
        source_format, to: the formats of the source and of the output.
        is_experimental: whether no test shows by another project's code that it reads `to`.
        dry_run: True when nothing was written.
        files: (name, bytes) of every file of the output.
        num_source_tensors: tensors of the source.
        num_tensors: tensors of the output.
        num_regrouped: those of them that are renamed, a fusion or a slice of source tensors; 0
            means that the source had this format already and only its files are new.
        data_bytes: bytes of all tensors of the output.
        copied_bytes: bytes of weight files that were written; less than all of them where the run
            went on with what another had written.
        left_out: files and folders of the source that are not in the output, with the reason.
        unknown_keys: tensors that the family's spec, or the format of the output where that has
            names of its own, does not name; carried as they are.
        other_keys: tensors of other parts of the model, such as a vision tower, whose names and
            bytes are the same in every format.
        num_computed: tensors of the output that hold computed, or transposed, bytes.
        removed_keys: tensors of the source that were left out on demand.
        removed_bytes: bytes of these.
        peak_memory_bytes: what this process has resident at its peak, imports included, as the plan
            predicts it; None where torch, which computing needs, is absent.
    """

    dst: Path
    source_format: str
    to: str
    is_experimental: bool
    dry_run: bool
    files: tuple[tuple[str, int], ...]
    num_source_tensors: int
    num_tensors: int
    num_regrouped: int
    data_bytes: int
    copied_bytes: int
    left_out: tuple[LeftOut, ...]
    unknown_keys: tuple[str, ...]
    other_keys: tuple[str, ...] = ()
    num_computed: int = 0
    removed_keys: tuple[str, ...] = ()
    removed_bytes: int = 0
    peak_memory_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of the output."""
        return sum(size_bytes for _, size_bytes in self.files)
