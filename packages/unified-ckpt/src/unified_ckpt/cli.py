"""The command `unified-ckpt`: look into checkpoints, check, compare, rewrite and convert them.

unified-ckpt inspect run/checkpoint-10 --keys
unified-ckpt verify run/checkpoint-10
unified-ckpt diff run/checkpoint-10 run/checkpoint-20
unified-ckpt reshard run/checkpoint-10 --to ep=4,tp=2 resharded
unified-ckpt export run/checkpoint-10 model
unified-ckpt from-dcp dcp/step-10 run/checkpoint-10
unified-ckpt to-dcp run/checkpoint-10 dcp/step-10
unified-ckpt tier /dev/shm/my-run
unified-ckpt recovery --nodes 8 --copies 1 --tier-steps 10 --storage-steps 500
"""

import argparse
import math
import os
import select
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unified_ckpt.errors import CheckpointValueError

if TYPE_CHECKING:
    from unified_ckpt.dcp import Converted
    from unified_ckpt.plans.checkpoint import Checkpoint

_AXES = ("tp", "ep", "etp")
_MAX_RANKS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if damage or a difference was found, or 2 for bad input."""
    arguments = _parser().parse_args(argv)
    from unified_ckpt.errors import CheckpointError

    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except (CheckpointError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 1
        print(f"unified-ckpt: {error}", file=sys.stderr)
        return 2
    return status


def _is_unread() -> bool:
    """Whether the reader of our output, such as `head`, has seen enough; if so, drop the rest."""
    poll, output = select.poll(), sys.stdout.fileno()
    poll.register(output, 0)
    return bool(poll.poll(0)) and os.dup2(os.open(os.devnull, os.O_WRONLY), output) == output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unified-ckpt", description="Look into checkpoints, check, compare or rewrite them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = "a checkpoint (a directory, or a URL), or a transformers directory"
    inspect = commands.add_parser("inspect", help="list parts, files, dtypes and sizes")
    inspect.add_argument("directory", help=one)
    inspect.add_argument("--keys", action="store_true", help="list every tensor as well")
    inspect.set_defaults(run=lambda a: _inspect(a.directory, keys=a.keys))
    verify = commands.add_parser("verify", help="compare every byte with its checksum")
    verify.add_argument("directory", help=one)
    quick = "only the manifest, sizes, headers and small files: what a run checks when it resumes"
    verify.add_argument("--quick", action="store_true", help=quick)
    verify.set_defaults(
        run=lambda a: _verify_quick(a.directory) if a.quick else _verify(a.directory)
    )
    diff = commands.add_parser("diff", help="compare keys, dtypes, shapes and values bit by bit")
    diff.add_argument("a", help=one)
    diff.add_argument("b", help=one)
    diff.set_defaults(run=lambda a: _diff(a.a, a.b))
    reshard = commands.add_parser(
        "reshard", help="write it so that each rank of a layout reads ranges of its own files"
    )
    out = "the directory, or the URL of a checkpoint in a store, to write"
    reshard.add_argument("directory", help=one)
    reshard.add_argument("--to", required=True, help="the layout, such as ep=4,tp=2,etp=1")
    reshard.add_argument("out", help=out)
    reshard.set_defaults(run=lambda a: _reshard(a.directory, a.to, a.out))
    export = commands.add_parser("export", help="write the weights alone, as transformers reads")
    export.add_argument("directory", help=one)
    export.add_argument("out", help=out)
    part = "whose tensors become the weights: model, ema or master_weights"
    export.add_argument("--part", default="model", help=part)
    export.set_defaults(run=lambda a: _export(a.directory, a.out, part=a.part))
    _add_dcp(commands)
    tier = commands.add_parser("tier", help="list the copies in a node's folder of a tier")
    tier.add_argument("directory", type=Path, help="the folder, such as /dev/shm/my-run")
    tier.set_defaults(run=lambda a: _tier(a.directory))
    _add_recovery(commands)
    return parser


def _add_dcp(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    of_torch = "a checkpoint of torch.distributed.checkpoint (a directory with .metadata)"
    new = "the directory to write; new, or empty"
    prefix = "names that begin with PREFIX are the tensors of PART; may be given more than once"
    from_dcp = commands.add_parser(
        "from-dcp",
        help="make a checkpoint of what torch.distributed.checkpoint has written",
        description="Its pickles may name plain values only, so that they run no code.",
    )
    from_dcp.add_argument("directory", help=of_torch)
    from_dcp.add_argument("out", help=new)
    from_dcp.add_argument("--prefix", action="append", metavar="PREFIX=PART", help=prefix)
    from_dcp.add_argument(
        "--trust-pickles",
        action="store_true",
        help="unpickle whatever it holds, which runs any code of whoever wrote it",
    )
    from_dcp.set_defaults(run=_from_dcp)
    to_dcp = commands.add_parser("to-dcp", help="make what torch.distributed.checkpoint reads")
    to_dcp.add_argument("directory", help="a checkpoint, or a transformers directory")
    to_dcp.add_argument("out", help=new)
    to_dcp.add_argument("--prefix", action="append", metavar="PREFIX=PART", help=prefix)
    to_dcp.set_defaults(run=_to_dcp)


def _add_recovery(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    recovery = commands.add_parser("recovery", help="the steps that lost nodes cost at most")
    recovery.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    recovery.add_argument("--copies", type=int, default=1, help="other nodes with each's copy")
    between = "steps between saves on the nodes"
    recovery.add_argument("--tier-steps", type=int, required=True, help=between)
    recovery.add_argument("--storage-steps", type=int, help="steps between those in storage")
    recovery.add_argument("--saves-behind", type=int, default=0, help="saves beside training")
    recovery.set_defaults(run=_recovery)


def _tier(directory: Path) -> int:
    from unified_ckpt.tiers import held_copies

    if not directory.is_dir():
        raise CheckpointValueError(
            f"{directory} is no directory; name the folder of TierOptions on this node"
        )
    copies = held_copies(directory)
    for copy in sorted(copies, key=lambda copy: (copy.step, copy.token, copy.ranks)):
        ranks = ",".join(map(str, copy.ranks))
        print(f"step {copy.step}, save {copy.token}: ranks {ranks} of {copy.world_size}")
        print(f"    {copy.num_bytes} bytes, {len(copy.files)} files, {directory / copy.name}")
    print(f"{directory}: {len(copies)} copies")
    return 0


def _recovery(arguments: argparse.Namespace) -> int:
    from unified_ckpt.tiers import CopyPlan, describe_recovery

    if arguments.nodes < 1 or arguments.copies < 0:
        raise CheckpointValueError(
            f"--nodes {arguments.nodes} must be at least 1, --copies {arguments.copies} at least 0"
        )
    plan = CopyPlan.of([f"node {n}" for n in range(arguments.nodes)], copies=arguments.copies)
    lines = describe_recovery(
        plan,
        tier_steps=arguments.tier_steps,
        storage_steps=arguments.storage_steps,
        saves_behind=arguments.saves_behind,
    )
    print(*lines, sep="\n")
    return 0


def _diff(a: str, b: str) -> int:
    from unified_ckpt.tools import diff_checkpoints

    count = 0
    for difference in diff_checkpoints(a, b):
        print(difference)
        count += 1
    print(f"{a} and {b}: " + (f"{count} differences" if count else "the same, bit by bit"))
    return 1 if count else 0


def _reshard(directory: str, layout: str, out: str) -> int:
    from unified_ckpt.geometry.layouts import ParallelDegrees
    from unified_ckpt.tools import reshard

    sizes = _sizes(layout)
    world_size = math.lcm(sizes["tp"], sizes["ep"] * sizes["etp"])
    if world_size > _MAX_RANKS:
        raise CheckpointValueError(
            f"--to {layout} means {world_size} ranks, more than {_MAX_RANKS}"
        )
    reshard(directory, out, ParallelDegrees(world_size=world_size, **sizes))
    print(f"{out}: written for {world_size} ranks ({layout})")
    return 0


def _sizes(layout: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in layout.split(","):
        name, _, text = item.partition("=")
        if name not in _AXES or not text.isdecimal() or int(text) < 1:
            raise CheckpointValueError(f"--to {layout}: {item!r} is none of tp=N, ep=N, etp=N")
        if name in sizes:
            raise CheckpointValueError(f"--to {layout}: {name} is there twice; name each axis once")
        sizes[name] = int(text)
    return dict.fromkeys(_AXES, 1) | sizes


def _export(directory: str, out: str, *, part: str) -> int:
    from unified_ckpt.tools import export_model

    export_model(directory, out, part=part)
    print(f"{out}: weights written")
    return 0


def _from_dcp(arguments: argparse.Namespace) -> int:
    from unified_ckpt.dcp import from_dcp

    prefixes, trusted = _prefixes(arguments.prefix or ()), arguments.trust_pickles
    done = from_dcp(arguments.directory, arguments.out, prefixes=prefixes, trusted=trusted)
    return _tell_converted(arguments.out, done)


def _to_dcp(arguments: argparse.Namespace) -> int:
    from unified_ckpt.dcp import to_dcp

    prefixes = _prefixes(arguments.prefix or ())
    return _tell_converted(
        arguments.out, to_dcp(arguments.directory, arguments.out, prefixes=prefixes)
    )


def _prefixes(given: Iterable[str]) -> dict[str, str]:
    prefixes: dict[str, str] = {}
    for text in given:
        prefix, equals, part = text.rpartition("=")
        if not equals or not part or prefix in prefixes:
            why = "names its prefix twice" if part and equals else "is not PREFIX=PART"
            raise CheckpointValueError(f"--prefix {text} {why}; expected such as 'net.=model'")
        prefixes[prefix] = part
    return prefixes


def _tell_converted(out: str, done: "Converted") -> int:
    for line in done.left:
        print(f"left out: {line}")
    print(f"{out}: {done.num_tensors} tensors, {done.num_bytes} bytes, {done.num_objects} objects")
    return 0


def _inspect(directory: str, *, keys: bool) -> int:
    from unified_ckpt.plans.checkpoint import read_checkpoint

    return read_checkpoint(directory, lambda checkpoint: _describe(checkpoint, keys=keys))


def _describe(checkpoint: "Checkpoint", *, keys: bool) -> int:
    directory, parts = checkpoint.folder, checkpoint.parts()
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


def _verify(directory: str) -> int:
    from unified_ckpt.plans.checkpoint import verify_checkpoint

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


def _verify_quick(directory: str) -> int:
    from unified_ckpt.files.storage import Location, as_target
    from unified_ckpt.folders import find_fault
    from unified_ckpt.plans.checkpoint import is_stored

    place = as_target("directory", directory)
    if not (is_stored(place) if isinstance(place, Location) else place.is_dir()):
        raise CheckpointValueError(f"{directory} is no checkpoint; name one that is there")
    fault = find_fault(place)
    if fault is None:
        print(f"{directory}: manifest, sizes, headers and small files are intact")
        return 0
    print(f"{directory}: {fault}")
    return 1
