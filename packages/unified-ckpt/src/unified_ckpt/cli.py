"""The command `unified-ckpt`: look into a checkpoint and check it, without writing anything.

unified-ckpt inspect run/checkpoint-10 --keys
unified-ckpt verify run/checkpoint-10
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if damage was found, or 2 if it could not be looked at."""
    parser = argparse.ArgumentParser(
        prog="unified-ckpt", description="Look into a checkpoint directory, or check it."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="list parts, files, dtypes and sizes")
    inspect.add_argument("directory", type=Path, help="a checkpoint, or a transformers directory")
    inspect.add_argument("--keys", action="store_true", help="list every tensor as well")
    verify = commands.add_parser("verify", help="compare every byte with its checksum")
    verify.add_argument("directory", type=Path, help="a checkpoint, or a transformers directory")
    arguments = parser.parse_args(argv)
    from unified_ckpt.errors import CheckpointError

    try:
        if arguments.command == "inspect":
            return _inspect(arguments.directory, keys=arguments.keys)
        return _verify(arguments.directory)
    except (CheckpointError, OSError) as error:
        print(f"unified-ckpt: {error}", file=sys.stderr)
        return 2


def _inspect(directory: Path, *, keys: bool) -> int:
    from unified_ckpt.checkpoint import Checkpoint, list_parts

    checkpoint = Checkpoint(directory)
    parts = list_parts(directory)
    if not parts and checkpoint.manifest is None:
        print(f"unified-ckpt: {directory} holds no safetensors part", file=sys.stderr)
        return 2
    kind = "no manifest (not checksummed)"
    if checkpoint.manifest is not None:
        kind = f"{len(checkpoint.manifest.files)} files with checksums"
    print(f"{directory}: {kind}")
    for part in parts:
        tensors = checkpoint.tensors(part)
        files = {tensor.file for tensor in tensors.values()}
        dtypes = Counter(tensor.dtype for tensor in tensors.values())
        num_bytes = sum(tensor.end - tensor.begin for tensor in tensors.values())
        print(
            f"  {part}: {len(tensors)} tensors, {num_bytes} bytes, {len(files)} files"
            + "".join(f", {count} {name}" for name, count in dtypes.most_common())
        )
        for key in sorted(tensors) if keys else ():
            tensor = tensors[key]
            shape = "?" if tensor.shape is None else list(tensor.shape)
            print(f"    {key}  {tensor.dtype}  {shape}  {tensor.file}")
    return 0


def _verify(directory: Path) -> int:
    from unified_ckpt.verify import verify_checkpoint

    report = verify_checkpoint(directory)
    for problem in report.problems:
        print(problem)
    if report.problems:
        print(f"{directory}: {len(report.problems)} damaged places")
        return 1
    if report.checksummed:
        print(f"{directory}: {report.num_bytes} bytes in {report.num_files} files are intact")
    else:
        print(f"{directory}: {report.num_files} files are well-formed; there are no checksums")
    return 0
