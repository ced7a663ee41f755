"""Real ranks: what is right is said to be right, and every planted fault is found by its check."""

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mesh_spmd.cli import main
from mesh_spmd.reshard import Plan
from mesh_spmd.trials import dtensors, grouping, making, moving, parting

README = (Path(__file__).parents[2] / "README.md").read_text()
NAMES = ["groups", "creation", "reshard", "bytes", "gradients", "random", "shapes", "parts"]
NAMES += ["dtensor"]
LINE = ["dp=2,ep=2/ep=0", "dp=2,ep=2/dp=1,ep=0", "--shape", "5,4"]


def run(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> dict[str, dict]:
    """The rows of JSON by check, those of the whole under an empty name."""
    found = main(["check", *line, "--json"])
    captured = capsys.readouterr()
    assert found == code, captured.out + captured.err
    rows = [json.loads(row) for row in captured.out.splitlines()]
    return {row.get("check", ""): row for row in rows}


def ended(rows: dict[str, dict], ranks: int) -> set[str]:
    """The checks that ran on every rank."""
    return {name for name in NAMES if rows[name]["ranks"] == ranks}


@pytest.mark.parametrize(
    ("line", "ranks", "left_out"),
    [
        # ep's third rank holds nothing of 4 rows; dp's second has the shorter part of 5 columns
        ("ep=3/ep=0 ep=3/ep=1 --shape 4,5,2", 3, set()),
        ("dp=2,ep=2/dp=0,ep=0 dp=2,ep=2/ep=1 --shape 3,0 --dtype F32", 4, set()),
        ("ep=2/ep=0:1+6 dp=1,ep=4/ep=0:0+0+7+0 --shape 7,3", 4, {"dtensor"}),
        ("dp=2,ep=2/ep=0/flat=dp ep=3/ranks=1-3/ep=0 --shape 5,3 --dtype float64", 4, {"dtensor"}),
        ("dp=2,ep=2/dp=sum,ep=0 dp=2,ep=2/dp=1 --shape 6,5 --dtype float32", 4, {"parts"}),
        ("dp=2,ep=2/dp=0,ep=0/order=ep,dp ep=4/ep=0 --shape 6 --dtype int8", 4, {"float"}),
        ("ep=2 ep=2/ranks=2-3 --shape= --dtype bool", 4, {"float", "parts"}),
    ],
)
def test_every_kind_of_layout_is_right_on_ranks_of_this_machine(
    capsys: pytest.CaptureFixture[str], line: str, ranks: int, left_out: set[str]
) -> None:
    rows = run(capsys, *line.split())
    if "float" in left_out:
        left_out = left_out - {"float"} | {"gradients", "random", "dtensor"}
    assert ended(rows, ranks) == set(NAMES) - left_out
    assert all(bool(rows[name]["left_out"]) == (name in left_out) for name in NAMES)
    assert rows[""] == {"right": True, "lost": []}


def test_the_table_shows_each_check_and_what_was_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "dp=2,ep=2/ep=0", "ep=4/ep=0", "--shape", "8,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "ranks", "verdict"]
    assert [line.split()[:3] for line in lines[1:9]] == [[name, "4", "right"] for name in NAMES[:8]]
    assert lines[9].split(maxsplit=2)[2] == "left out: torch redistributes on one mesh"
    # Of two bytes each: ranks 1 and 2 lack a quarter, whose two holders send a half each.
    assert lines[11] == (
        "4 rank(s) on cpu; busiest rank: 16 bytes received, 8 sent; 32 bytes in all"
    )


def test_the_example_of_the_readme_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```\n\$ mesh-spmd check (.*?)\n(.*?)```", README, re.DOTALL)
    assert main(["check", *block[0].split()]) == 0
    assert capsys.readouterr().out == block[1]


def on_rank(number: int, wrong: Callable[..., Any], right: Callable[..., Any]) -> Any:
    """`wrong`, given what `right` returns, in the place of `right` on one rank."""

    def call(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        return wrong(found) if dist.get_rank() == number else found

    return call


def last_element_changed(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.detach().clone()
    if changed.numel():
        changed.view(-1)[-1] += 1
    return changed


def test_an_element_that_arrives_wrong_is_named_with_its_rank_and_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = on_rank(2, last_element_changed, moving.reshard_tensor)
    monkeypatch.setattr(moving, "reshard_tensor", wrong)
    assert main(["check", *LINE]) == 1
    out = capsys.readouterr().out
    assert "reshard    4      DIFFERS" in out
    # Rank 2 has rows 0 to 2 of columns 2 and 3; its last element is number 11 of the whole.
    assert (
        "rank 2, target: element (2, 1) of its part, (2, 3) of the whole: "
        "got 12.0, expected 11.0; 1 of 6 elements differ"
    ) in out
    assert "rank 0, target" not in out


def test_bytes_that_are_swapped_on_the_wire_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = dist.all_to_all_single

    def swapped(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        done = real(output, input, *args, **options)
        output.copy_(output.view(-1, 2).flip(0).flatten())  # elements of two bytes, backwards
        return done

    monkeypatch.setattr(dist, "all_to_all_single", swapped)
    line = ["ep=2/ep=0", "ep=2/ep=1", "--shape", "2,1200"]
    rows = run(capsys, *line, code=1)
    assert {name for name in NAMES if rows[name]["problems"]} == {
        "reshard", "gradients", "random", "dtensor",
    }  # fmt: skip
    assert any("600 of 1,200 elements differ" in text for text in rows["reshard"]["problems"])


@pytest.mark.parametrize(
    ("check", "module", "name", "wrong"),
    [
        ("groups", grouping, "axis_group", lambda group: dist.group.WORLD),
        ("creation", making, "randn", last_element_changed),
        ("shapes", making, "reshard_tensor", lambda found: found[:, :1]),
        ("parts", parting, "join_tensors", last_element_changed),
        ("parts", parting, "split_tensor", lambda found: [last_element_changed(x) for x in found]),
        ("dtensor", dtensors, "redistribute", lambda found: found + 1),
    ],
)
def test_a_fault_is_found_by_its_check_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    check: str,
    module: Any,
    name: str,
    wrong: Callable[..., Any],
) -> None:
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: wrong(right(*args, **options)))
    rows = run(capsys, *LINE, "--timeout-s", "20", code=1)
    assert {name for name in NAMES if rows[name]["problems"]} == {check}
    assert rows[""]["lost"] == []


def test_bytes_beside_the_plan_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = Plan.sent_bytes.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Plan, "sent_bytes", property(lambda plan: planned(plan) | {3: 1}))
    rows = run(capsys, *LINE, code=1)
    (problem,) = rows["bytes"]["problems"]
    assert problem.startswith("rank 3: got ") and problem.endswith("sent, expected 1 as planned")


def test_a_rank_that_dies_is_named_with_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(*args: Any) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(moving, "plan_reshard", dies)
    rows = run(capsys, *LINE, code=1)
    assert rows[""]["lost"][0] == "rank 1 was killed by SIGKILL in the check bytes"
    assert not rows[""]["right"] and rows["bytes"]["ranks"] < 4


def test_a_rank_that_hangs_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(*args: Any, **options: Any) -> None:
        if dist.get_rank() == 3:
            time.sleep(600)

    monkeypatch.setattr(moving, "randn", hangs)
    began = time.monotonic()
    assert main(["check", *LINE, "--timeout-s", "2"]) == 1
    assert time.monotonic() - began < 60
    out = capsys.readouterr().out
    assert "rank 3 gave no sign within 2 s in the check random" in out
    assert "random     0      did not end" in out


def test_what_torch_cannot_do_on_this_machine_is_said_by_each_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*args: Any, **options: Any) -> None:
        raise RuntimeError("no kernel\nof this kind")

    monkeypatch.setattr(moving, "plan_reshard", refuses)
    rows = run(capsys, "ep=2/ep=0", "ep=2", "--shape", "4", code=1)
    assert rows[""]["lost"][0].startswith("rank ")
    assert "failed (RuntimeError: no kernel) in the check bytes" in rows[""]["lost"][0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ep=2/ep=0 --shape 4", "the target layout is missing"),
        ("ep=2/ep=1 ep=2 --shape 4", "the source layout 'ep=2/ep=1'"),
        ("ep=2 ep=2/ranks=31-32 --shape 4", "need ranks 0 to 32, 33 processes"),
        ("ep=2 ep=2 --shape 64,1024,512", "are checked: make sizes smaller"),
        ("ep=2 ep=2/ep=sum --shape 4", "leave the reduction out of the target"),
        ("ep=2/ep=max ep=2 --shape 4", "give sum, or leave it out"),
        ("ep=2 ep=2 --shape 4 --dtype qint8", "give a floating, complex or integer dtype"),
        ("ep=2 ep=2 --shape 4 --device tpu", "ranks are checked on cpu or cuda"),
        ("ep=2 ep=2 --shape 4 --timeout-s 0", "--timeout-s got '0'; give seconds above zero"),
        ("ep=2 ep=2 --shape 4 --timeout-s soon", "--timeout-s got 'soon'"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert main(["check", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *LINE, "--device", "cuda"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_ranks_take_the_devices_in_turn(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One rank on each device with NCCL, and twice as many ranks as devices with gloo."""
    if request.config.getoption(
        "--on-devicetest", default=False
    ):  # its devices are there for forked ranks alone
        fork = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    devices = torch.cuda.device_count()
    for ranks in (devices, 2 * devices):
        line = (f"ep={ranks}/ep=0", f"ep={ranks}/ep=1", "--shape", "5,4")
        rows = run(capsys, *line, "--device", "cuda", "--timeout-s", "240")
        assert ended(rows, ranks) >= {"groups", "creation", "reshard", "bytes", "gradients"}
    # Ranks without a source tensor have their buffers where the others have theirs.
    run(capsys, "ep=1/ep=0", f"ep={devices}/ep=0", "--shape", "7", "--device", "cuda")
