"""What a rank allocates is recorded by phase; one without memory names itself and its phase."""

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from devicetest import fake_cuda
from devicetest.cuda_stub import StubUnavailableError, run_on_stub
from devicetest.nccl import has_nccl_rules
from gpu_alloc import AllocatorConfig, AllocError, load_trace, replay
from gpu_alloc.torch import open_arena
from gpu_alloc.trace import explain, summarize
from moe_train.config import Config
from moe_train.data import Batch
from moe_train.early_checks import check_early
from moe_train.errors import RankOutOfMemoryError
from moe_train.jobs.job import check, train
from moe_train.parallel import start
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from moe_train.training import build_runner, read_model_config
from moe_train.training.memory import RankMemory, trace_file
from ranktest import collect_ranks, run_ranks
from unified_ckpt.geometry import shard

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]
StepHook = Callable[[Callable[[int], None]], RankContext]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("moment", "phase"),
    [
        ("before a forward", "gradients, forward of microbatch 0, stage 0"),
        ("behind a forward", "gradients, backward of microbatch 0, stage 0"),
        ("before the update", "optimizer"),
    ],
)
def test_a_rank_whose_memory_is_full_names_what_it_was_busy_with(
    configure: Configure, random_batches: Batches, moment: str, phase: str
) -> None:
    of_update = ("train.dtype=bfloat16", "train.stochastic_rounding=true")  # it allocates
    config = configure("train.device=cuda", "train.recompute=layers", *of_update)
    model = read_model_config(config)

    def fn(*_: int) -> str:
        with fake_cuda(unchecked=[(shard, "_check_tensor")]) as cuda:

            def fill(*_: object) -> None:
                cuda.memory_bytes = cuda.allocated[0]

            parallel = start(config)
            runner, _checkpointer = build_runner(config, model, parallel, {})
            stage = runner.stages.by_number[0]
            if moment == "before a forward":
                stage.register_forward_pre_hook(fill)
            elif moment == "behind a forward":
                stage.register_forward_hook(fill)
            else:
                runner = replace(runner, before_update=fill)
            with (
                pytest.raises(RankOutOfMemoryError) as error,
                RankMemory.begin(config, parallel.device) as memory,
                memory.step(7),
            ):
                runner.train(random_batches(config, 0), lr=0.1, memory=memory)
            return str(error.value)

    (told,) = run_ranks(fn, 1)
    first, cause, remedy, written = told.splitlines()
    assert first == f"rank 0 is out of memory in step 7, {phase}"
    assert re.match(r"  CUDA out of memory\. Tried to allocate \d+ bytes", cause)
    assert "train.gradient_accumulation_steps" in remedy
    path = re.search(r"with the traceback to (\S+); memory.record=true keeps", written)
    assert path is not None, written
    report = Path(path[1]).read_text()
    assert report.startswith(first) and "Traceback (most recent call last)" in report


@pytest.mark.skipif(
    not has_nccl_rules(), reason="this torch takes no process group written in Python"
)
def test_an_out_of_memory_on_one_rank_ends_all_with_its_name_and_phase(
    configure: Configure, tmp_path: Path, step_hook: StepHook
) -> None:
    """Ranks of two stages with two expert ranks each; the last one has no room in step 2."""
    layout = ("parallel.pp=2", "parallel.ep=2", "parallel.timeout_s=24", "train.device=cuda")
    config = configure(*layout, "memory.record=true")
    check(configure("parallel.pp=2", "parallel.ep=2"), "")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def fn(rank: int, world_size: int) -> None:
        if rank == 4:  # as torchrun has it, the store does not end with a rank
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            while len(list(tmp_path.glob("told-*"))) < 4:
                time.sleep(0.05)
            del store
            return
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with fake_cuda(devices=4, unchecked=[(shard, "_check_tensor")]) as cuda:

            def after(step: int) -> None:
                if (rank, step) == (3, 1):
                    cuda.memory_bytes = cuda.allocated[3] + (8 << 10)

            with pytest.raises(RuntimeError) as error:
                train(config, "", step_hook(after))
            text = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
            (tmp_path / f"part-{rank}").write_text(text)
            (tmp_path / f"part-{rank}").rename(tmp_path / f"told-{rank}")
            os._exit(1)  # at once, as a rank ends that fails

    collect_ranks(fn, 5, init=False, timeout_s=300)
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(4)]
    where = "rank 3 is out of memory in step 2, gradients, forward of microbatch 0, stage 1"
    assert told[3].startswith(where), told[3]
    assert all(where in text for text in told), told
    folder = tmp_path / "run/memory"
    assert (folder / "rank-00003.out_of_memory.txt").read_text().startswith(where)
    trace = load_trace(trace_file(folder, 3))
    found = explain(trace, AllocatorConfig(), summarize(trace).peak_live_bytes - 1)
    assert found is not None, "the request that failed stands in the trace"


def test_a_run_keeps_what_each_rank_allocated_in_its_last_steps(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("parallel.dp=2", "memory.record=true", "train.max_steps=5")
    check(config, "")

    def fn(rank: int, _: int) -> None:
        os.environ["RANK"] = str(rank)
        train(config, "", RankContext())

    run_ranks(fn, 2)
    for rank in range(2):
        trace = load_trace(trace_file(tmp_path / "run/memory", rank))
        marks = [event.note for event in trace if event.action == "mark"]
        steps = [note for note in marks if re.fullmatch(r"step \d+", note)]
        assert steps == ["step 3", "step 4", "step 5"]
        assert {"optimizer", "checkpoint", "backward of microbatch 1, stage 0"} <= set(marks)
        parts = dict(summarize(trace).peak_by_line)
        assert parts.keys() >= {"parameters", "gradients", "optimizer", ""}
        assert parts["optimizer"] > 1.9 * parts["parameters"] > 0
        replay(trace, AllocatorConfig())  # raises for what is freed twice or never was


def test_gpu_alloc_on_the_cpu_and_settings_that_are_none_are_refused_by_name(
    configure: Configure, tmp_path: Path
) -> None:
    ours = "memory.allocator=gpu-alloc"
    with pytest.raises(ValueError, match=r'^memory.allocator="gpu-alloc" serves CUDA devices, and'):
        check(configure(ours), "")
    wrong = configure(ours, "memory.settings='small_pool_sise_in_mb:1'")
    with pytest.raises(ValueError, match=r"^memory.settings: unknown key 'small_pool_sise_in_mb'"):
        check_early(wrong, resuming=False)
    absent = configure(ours, "memory.settings_file=nowhere.toml")
    with pytest.raises(FileNotFoundError, match=r"^memory.settings_file=.*nowhere.toml does not"):
        check_early(absent, resuming=False)
    (tmp_path / "tuned.toml").write_text("[gpu_alloc]\nalignment_size = 3\n")
    torn = configure(ours, f"memory.settings_file={tmp_path}/tuned.toml")
    with pytest.raises(ValueError, match=r"^memory.settings_file: .*alignment_size=3 is not a pow"):
        check_early(torn, resuming=False)


def test_a_job_on_devices_asks_gpu_alloc_with_its_settings_before_it_uses_them(
    configure: Configure, tmp_path: Path
) -> None:
    """The memory of these devices is nobody's; that torch's is ours, the next test shows."""
    (tmp_path / "tuned.toml").write_text("[gpu_alloc]\nlarge_pool_pre_alloc_in_mb = 64\n")
    file = f"memory.settings_file={tmp_path}/tuned.toml"
    config = configure("train.device=cuda", "memory.allocator=gpu-alloc", file)
    check(configure(), "")

    def fn(*_: int) -> str:
        with fake_cuda(unchecked=[(shard, "_check_tensor")]) as cuda:
            train(config, "", RankContext())
            cuda.check()
        open_arena(AllocatorConfig(large_pool_pre_alloc_in_mb=64))
        with pytest.raises(AllocError) as error:
            open_arena(AllocatorConfig())
        return str(error.value)

    (told,) = run_ranks(fn, 1)
    assert told.startswith("torch is served by gpu_alloc with other settings already")
    assert len(list(read_metrics(tmp_path / "run/metrics.jsonl"))) > 3


def test_a_rank_of_torch_lies_in_gpu_allocs_memory_and_its_report_names_rank_and_phase(
    configure: Configure, tmp_path: Path
) -> None:
    """torch's own code, on a stub of CUDA that has 1 GiB."""
    configure()
    try:
        program = str(Path(__file__).with_name("on_stub.py"))
        done = run_on_stub(program, f"{tmp_path}/job.toml", gpu_bytes=1 << 30)
    except StubUnavailableError as error:
        pytest.skip(f"no stub of CUDA here: {error}")
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout)
    assert facts["requested_bytes"] >= 3 * facts["weights_bytes"] > 0, "weights and two moments"
    told = facts["told"].splitlines()
    assert told[0] == "rank 2 is out of memory in step 4, forward of microbatch 1, stage 0"
    assert told[1].startswith("  out of memory: 900.00 MiB (943718400 bytes after padding)")
    assert "the source has no room for 900.00 MiB more" in facts["told"]
    assert told[-1].endswith(f"rank-00002.jsonl --capacity-bytes {1 << 30}")
    trace = load_trace(trace_file(tmp_path / "run/memory", 2))
    assert max(event.size_bytes for event in trace) == 900 * MIB
    found = explain(trace, AllocatorConfig(), 512 * MIB)
    assert found is not None and not found.possible and "forward" in found.phase
