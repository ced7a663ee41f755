"""torch's own distributed tests with this package under them: what bare gloo passes has to pass.

torch ships the tests of its collectives and point-to-point calls. Each test that bare gloo passes
here is run again by three forked ranks, in the same run: with every gloo group of the test made by
`comm_shm` instead, so that tests that ask for gloo by name run as well, and with the drop-ins put
in the place of torch's functions. Ranges of torch's profiler, which its own backends make, are not
looked for. A test that has to fail comes first: a harness that passes it measures nothing.

    python benchmarks/comm_collectives_torch_suite.py                 # all modes, all tests
    python benchmarks/comm_collectives_torch_suite.py comm_shm test_send_recv
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

WORLD_SIZE = 3
LIMIT_S = 300.0
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
# Written before the tests are imported: they read it when they are.
TEMP = Path(tempfile.mkdtemp(prefix="torch-suite-"))
os.environ.update(
    BACKEND="gloo",
    INIT_METHOD=f"file://{TEMP}/init_dir/shared",
    OMP_NUM_THREADS="1",
    TEMP_DIR=str(TEMP),
    WORLD_SIZE=str(WORLD_SIZE),
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from comm_collectives.collectives.drop_in import patched_torch  # noqa: E402
from comm_collectives.shm import register_backends  # noqa: E402

# The log of DistributedDataParallel has to name gloo in it, and names the backend that it has.
LEFT_OUT = ("test_canary", "test_ddp_logging_data_cpu")
PATCHES = ExitStack()  # kept open until the process ends
SKIP_CODES = {skip.exit_code for skip in common_distributed.TEST_SKIPS.values()}


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's tests, and one that has to fail."""

    def test_canary(self) -> None:
        x = torch.ones(1)
        dist.all_reduce(x)
        self.assertEqual(x.item(), dist.get_world_size() + 1)


def comm_shm() -> None:
    """Have every group of gloo made by the shared-memory backend."""
    # Ranges of torch's profiler are only looked for under the names of its own backends.
    distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    register_backends()
    plugin = dist.Backend._plugins["COMM_SHM"]
    dist.Backend.register_backend("gloo", plugin.creator_fn, extended_api=True, devices=["cpu"])


def drop_in() -> None:
    """Have the drop-ins in place of torch's functions, until the process ends."""
    # Ranges of torch's profiler are made by its own backends.
    distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    torchs = dist.all_reduce
    PATCHES.enter_context(patched_torch())
    if dist.all_reduce is torchs:
        raise RuntimeError("nothing is replaced")


MODES: dict[str, Callable[[], None]] = {"comm_shm": comm_shm, "drop_in": drop_in}


def rank_main(rank: int, test: str, mode: str, folder: str, pipe: object) -> None:
    """Run one rank of one test in a process of its own, and end the process."""
    code = 1
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        torch.set_num_threads(1)
        if mode != "gloo":
            MODES[mode]()
        Suite._run(rank, test, f"{folder}/store", pipe)
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:  # noqa: BLE001 - a test may raise anything, and ends here
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_test(test: str, mode: str) -> tuple[str, str]:
    """Run one test on all ranks: how it ended, and what the ranks said."""
    for part in ("barrier", "test_dir", "init_dir"):
        (TEMP / part).mkdir(exist_ok=True)
        for old in (TEMP / part).iterdir():
            old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [multiprocessing.Pipe() for _ in range(WORLD_SIZE)]
        ranks = []
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                rank_main(rank, test, mode, folder, pipes[rank][1])
            ranks.append(pid)
        codes = [await_exit(pid, time.monotonic() + LIMIT_S) for pid in ranks]
        said = "\n".join(Path(folder, f"log{r}").read_text() for r in range(WORLD_SIZE))
    if all(code == 0 for code in codes):
        return PASSED, said
    if all(code in SKIP_CODES for code in codes):
        return SKIPPED, said
    return FAILED, f"exit codes {codes}\n{said}"


def await_exit(pid: int, deadline: float) -> int:
    """Wait for a process; one that is late is killed."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def passes(test: str, mode: str) -> bool | None:
    """Run one test and report how it ended; None if it was skipped."""
    start = time.monotonic()
    how, said = run_test(test, mode)
    print(f"{test} {mode} {how} {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    if how == FAILED and mode != "gloo":
        print(said[-3000:], file=sys.stderr, flush=True)
    return None if how == SKIPPED else how == PASSED


def main() -> None:
    modes = [word for word in sys.argv[1:] if word in MODES] or list(MODES)
    words = [word for word in sys.argv[1:] if word not in MODES]
    for mode in ("gloo", *modes):
        if run_test("test_canary", mode)[0] != FAILED:
            sys.exit(f"a test that has to fail passes on {mode}: nothing is measured")
    names = [name for name in sorted(dir(Suite)) if name.startswith("test_")]
    chosen = [name for name in names if not words or any(word in name for word in words)]
    yardstick = [name for name in chosen if name not in LEFT_OUT and passes(name, "gloo")]
    for mode in modes:
        # A test that fails once beside other work gets a second chance, as bare gloo's do not need.
        lost = [name for name in yardstick if not (passes(name, mode) or passes(name, mode))]
        values = {"value": len(lost), "unit": "tests", "n": len(yardstick), "lost": lost}
        print(json.dumps({"figure": f"torch_suite_lost_on_{mode}", **values}))


if __name__ == "__main__":
    try:
        main()
    finally:
        shutil.rmtree(TEMP, ignore_errors=True)
