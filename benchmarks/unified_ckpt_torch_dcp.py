"""torch's own tests of DCP with our reader and writer in the place of torch's: none may be lost.

torch's wheels do not hold these tests, so they come from a checkout of its source, of the version
that is installed. Every test runs twice, on CPU and gloo: as it is, and with `FileSystemWriter` and
`FileSystemReader` meaning ours. Tests that torch's own pair does not pass here (those that need
devices) count for nothing. A canary that has to fail comes first.

    python benchmarks/unified_ckpt_torch_dcp.py --source ../pytorch
    python benchmarks/unified_ckpt_torch_dcp.py --source ../pytorch --only test_dtensor_resharding
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("test/distributed/checkpoint")
# Of readers, writers and planners as a user meets them; not those of torch's own file formats.
MODULES = (
    "test_file_system_checkpoint_cpu",
    "test_dtensor_checkpoint",
    "test_dtensor_resharding",
    "test_tp_checkpoint",
    "test_hsdp_checkpoint",
    "test_fsdp_model_state",
    "test_fsdp_optim_state",
    "test_fsdp_tp_checkpoint_conversion",
    "test_save_load_api",
    "e2e/test_fsdp_ep",
    "e2e/test_pipeline",
    "e2e/test_e2e_save_and_load",
    "e2e/test_fine_tuning",
)
LIMIT_S = 1800.0
_PAIR = "UNIFIED_CKPT_DCP_PAIR"


class Canary(unittest.TestCase):
    """A harness that passes this measures nothing."""

    def test_canary(self) -> None:
        self.assertEqual(1, 2)


def put_in_place(pair: str) -> None:
    """Run without devices; with `ours`, let torch's names mean our reader and writer."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    def anywhere(*_: Any, **__: Any) -> Any:
        return lambda test: test

    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = anywhere
    # Without devices a fork is safe, and a rank begins at once.
    fork = torch.multiprocessing.get_context("fork").Process
    ranks = common_distributed.MultiProcessTestCase
    ranks._spawn_processes = lambda case: case._start_processes(fork)
    if pair == "torch":
        return
    from unified_ckpt.dcp.reader import UnifiedStorageReader
    from unified_ckpt.dcp.writer import UnifiedStorageWriter

    class Writer(UnifiedStorageWriter):
        """Ours; how torch's lays out and syncs its files does not concern it."""

        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(path)

    class Reader(UnifiedStorageReader):
        """Ours."""

        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(path)

    for module in (dcp, filesystem):
        module.FileSystemWriter, module.FileSystemReader = Writer, Reader
    for name in ("state_dict_saver", "state_dict_loader", "_storage_utils"):
        module = importlib.import_module(f"torch.distributed.checkpoint.{name}")
        for own in ("FileSystemWriter", "FileSystemReader"):
            if hasattr(module, own):
                setattr(module, own, getattr(dcp, own))


if _PAIR in os.environ:  # also in the processes that torch's tests spawn, which import this file
    put_in_place(os.environ[_PAIR])


class Recorder(unittest.TestResult):
    """Remembers which tests passed."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed.append(test.id())


def run_module(source: Path, name: str, outcome: Path) -> None:
    """Run one file's tests in this process; write the names of those that passed."""
    path = source / FOLDER / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    loader, recorder = unittest.TestLoader(), Recorder()
    suite = unittest.TestSuite([loader.loadTestsFromTestCase(Canary)])
    suite.addTests(loader.loadTestsFromModule(importlib.import_module(path.stem)))
    suite.run(recorder)
    failed = {test.id(): text for test, text in [*recorder.failures, *recorder.errors]}
    if not any(test.endswith("test_canary") for test in failed):
        raise SystemExit("the canary passed")
    outcome.write_text(json.dumps({"passed": recorder.passed, "failed": failed}))


def passed_with(pair: str, source: Path, name: str) -> dict[str, Any]:
    """Run one file's tests in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="torch-dcp-") as folder:
        outcome = Path(folder) / "outcome.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--source", str(source)]
        command += ["--module", name, "--outcome", str(outcome)]
        environment = {**os.environ, _PAIR: pair, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        done = subprocess.run(
            command, env=environment, cwd=folder, timeout=LIMIT_S, capture_output=True, text=True
        )
        if not outcome.is_file():
            return {"passed": [], "failed": {name: done.stderr[-2000:]}}
        found: dict[str, Any] = json.loads(outcome.read_text())
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compare both pairs over all files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = os.environ.get("TORCH_SOURCE")
    parser.add_argument("--source", type=Path, default=default, help="or TORCH_SOURCE")
    parser.add_argument("--only", choices=MODULES, nargs="*", default=MODULES)
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.source is None or not (Path(arguments.source) / FOLDER).is_dir():
        parser.error(f"--source must be a checkout of torch's source, with {FOLDER} in it")
    source = Path(arguments.source).absolute()
    if arguments.module:
        run_module(source, arguments.module, arguments.outcome)
        return 0
    total, lost = 0, []
    for name in arguments.only:
        if not (source / FOLDER / f"{name}.py").is_file():
            print(f"{name}: not in this checkout", flush=True)
            continue
        theirs, ours = (passed_with(pair, source, name) for pair in ("torch", "ours"))
        missing = sorted(set(theirs["passed"]) - set(ours["passed"]))
        total += len(theirs["passed"])
        lost += missing
        print(f"{name}: {len(theirs['passed'])} pass, {len(missing)} of them not with ours")
        for test in missing:
            print(f"  {test}: {ours['failed'].get(test, '?').strip().splitlines()[-1]}", flush=True)
    print(f"{total} tests pass with torch's reader and writer")
    line = {"figure": "unified_ckpt_torch_dcp_lost", "value": len(lost), "unit": "tests"}
    print(json.dumps(line | {"n": total}))
    return 0 if total else 1


if __name__ == "__main__":
    sys.exit(main())
