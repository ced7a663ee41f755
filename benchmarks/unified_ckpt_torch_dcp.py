"""torch's own tests of DCP with our reader and writer in the place of torch's: none may be lost.

torch's wheels do not hold these tests, so they come from a checkout of its source, or from a folder
with `test/distributed/checkpoint` of it; of which version they are is the caller's choice, and what
does not run with the installed torch's own classes counts for nothing. Every test runs twice,
on CPU and gloo: as it is, and with torch's readers and writers of files, of fsspec and of Hugging
Face folders meaning ours. Where a test names GPUs, its text is changed in memory, for both alike
(`ON_CPU`). Tests that torch's own classes do not pass here (those that need devices) count for
nothing. A canary that has to fail comes first.

    python benchmarks/unified_ckpt_torch_dcp.py --source ../pytorch
    python benchmarks/unified_ckpt_torch_dcp.py --source ../pytorch --only test_dtensor_resharding
"""

import argparse
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("test/distributed/checkpoint")
# Of readers, writers and planners as a user meets them. Not test_hf_storage and test_checkpoint:
# those call torch's classes by their inner methods, or bring readers and writers of their own; not
# test_compatibility and test_format_utils, which are about the bytes of torch's own files; and not
# e2e/test_fsdp_ep, which saves nothing.
MODULES = (
    "test_file_system_checkpoint",
    "test_file_system_checkpoint_cpu",
    "test_dtensor_checkpoint",
    "test_dtensor_resharding",
    "test_tp_checkpoint",
    "test_hsdp_checkpoint",
    "test_fsdp_model_state",
    "test_fsdp_optim_state",
    "test_fsdp_tp_checkpoint_conversion",
    "test_save_load_api",
    "test_fsspec",
    "test_hf_safetensor_e2e",
    "e2e/test_pipeline",
    "e2e/test_e2e_save_and_load",
    "e2e/test_fine_tuning",
    "fsdp/test_fsdp_dsd",
    "test_planner",
)
# Counts for nothing, and is named: it opens the one file of torch's writer by its name, which is
# `model.safetensors` in ours, as in transformers.
OF_FILE_NAMES = ("test_hf_safetensor_e2e.TestSingleRankSaveLoad.test_save",)
LIMIT_S = 1800.0
_PAIR = "UNIFIED_CKPT_DCP_PAIR"
# What a test's text says of GPUs, and what it says here.
ON_CPU = (
    (r"\.cuda\((self\.rank|dist\.get_rank\(\))?\)", ""),
    (r"\.to\(self\.rank\)", ""),
    (r"\n *@requires_nccl\(\)", ""),
    (r"with_comms\(init_rpc=False\)", 'with_comms(init_rpc=False, backend="gloo")'),
    (r"torch\.cuda\.device_count\(\)", "8"),
    (r"current_accelerator\(\)", "current_accelerator(check_available=True)"),
    (r"device=dist\.get_rank\(\)", 'device="cpu"'),
    (r"\"cpu:gloo,cuda:nccl\"", '"gloo"'),
    (r"f\"cpu:gloo,\{self\.device_type\}:\{curr_backend\}\"", '"gloo"'),
    (r"f?\"cuda(:\d|:\{.*?\})?\"", '"cpu"'),
    (r"/cuda:(\d|\{.*?\})", ""),
    (r"except_for=(\"cpu\"|\[\"cpu\"\])", 'only_for="cpu"'),
)


class OnCpu(importlib.machinery.SourceFileLoader):
    """Loads a test of torch's with `ON_CPU` done to its text."""

    def get_code(self, fullname: str) -> Any:
        text = self.get_data(self.path).decode()
        for pattern, instead in ON_CPU:
            text = re.sub(pattern, instead, text)
        return compile(text, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds torch's tests, also in the processes that they spawn."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or str(FOLDER) not in spec.origin:
            return None
        spec.loader = OnCpu(fullname, spec.origin)
        return spec


class Canary(unittest.TestCase):
    """A harness that passes this measures nothing."""

    def test_canary(self) -> None:
        self.assertEqual(1, 2)


def put_on_cpu() -> None:
    """Run torch's tests without devices, their ranks as forks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal import common_distributed, common_fsdp
    from torch.testing._internal.distributed._tensor import common_dtensor

    def anywhere(*_: Any, **__: Any) -> Any:
        return lambda test: test

    def run(cls: Any, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
        case = cls(test_name)
        case.rank, case.file_name = rank, file_name
        dist.init_process_group(
            "gloo", init_method=case.init_method, world_size=int(case.world_size), rank=rank
        )
        case.run_test(test_name, pipe)
        dist.barrier()
        dist.destroy_process_group()

    begin = FullyShardedDataParallel.__init__

    @functools.wraps(begin)
    def begin_here(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **{"device_id": torch.device("cpu"), **named})

    FullyShardedDataParallel.__init__ = begin_here  # which has no default without devices
    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = anywhere
    common_fsdp.FSDPTest._run = classmethod(run)
    # Without devices a fork is safe, and a rank begins at once.
    torch.multiprocessing.set_start_method("fork", force=True)
    fork = torch.multiprocessing.get_context("fork").Process
    ranks = common_distributed.MultiProcessTestCase
    ranks._spawn_processes = lambda case: case._start_processes(fork)
    sys.meta_path.insert(0, Finder())


def stand_in(name: str, base: Any, **options: Any) -> Any:
    """Return our class under torch's name; how torch lays out its files does not concern it."""

    def begin(self: Any, path: Any, *_: Any, **given: Any) -> None:
        known = {"overwrite": given["overwrite"]} if "overwrite" in given else {}
        base.__init__(self, path, **options, **known)

    return type(name, (base,), {"__init__": begin, "__module__": __name__})


def put_ours_in_place() -> None:
    """Let torch's names of readers and writers mean ours, here and in its modules."""
    from unified_ckpt.dcp import UnifiedStorageReader, UnifiedStorageWriter

    names = ("filesystem", "fsspec_filesystem", "_fsspec_filesystem", "hf_storage")
    names += ("state_dict_saver", "state_dict_loader", "_storage_utils")
    package = "torch.distributed.checkpoint"
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    modules += [importlib.import_module(package), sys.modules[__name__]]
    for name, base in (("Writer", UnifiedStorageWriter), ("Reader", UnifiedStorageReader)):
        for kind in ("FileSystem", "Fsspec"):
            setattr(modules[-1], kind + name, stand_in(kind + name, base))
        hf = stand_in(f"HuggingFaceStorage{name}", base, prefixes={"": "model"})
        setattr(modules[-1], f"HuggingFaceStorage{name}", hf)
        for module in modules[:-1]:
            for own in (f"FileSystem{name}", f"Fsspec{name}", f"HuggingFaceStorage{name}"):
                if hasattr(module, own):
                    setattr(module, own, getattr(modules[-1], own))


if _PAIR in os.environ:  # also in the processes that torch's tests spawn, which import this file
    put_on_cpu()
    if os.environ[_PAIR] == "ours":
        put_ours_in_place()


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
        counted = {test for test in theirs["passed"] if test not in OF_FILE_NAMES}
        missing = sorted(counted - set(ours["passed"]))
        total += len(counted)
        lost += missing
        print(f"{name}: {len(counted)} pass, {len(missing)} of them not with ours")
        for test in set(theirs["passed"]) - counted:
            print(f"  not counted, of another file's name: {test}")
        uncounted = {t: why for t, why in theirs["failed"].items() if "test_canary" not in t}
        for word, failed in (("lost", ours["failed"]), ("not with torch's", uncounted)):
            for test in missing if word == "lost" else failed:
                reason = failed.get(test, "?").strip().splitlines()[-1]
                print(f"  {word}: {test}: {reason}", flush=True)
    print(f"{total} tests pass with torch's reader and writer")
    line = {"figure": "unified_ckpt_torch_dcp_lost", "value": len(lost), "unit": "tests"}
    print(json.dumps(line | {"n": total}))
    return 0 if total else 1


if __name__ == "__main__":
    sys.exit(main())
