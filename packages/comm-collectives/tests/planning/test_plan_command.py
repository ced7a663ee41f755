"""The sub-command `plan`: what it prints, how it ends, and that it never needs torch."""

import json
import subprocess
import sys

import pytest

from comm_collectives.cli import main

_V3 = ["--nodes", "8", "--gpus-per-node", "8", "--experts", "256", "--topk", "8"]
_V3 += ["--hidden", "7168"]


def test_plan_prints_every_variant_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *_V3]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [" ".join(line.split()[:2]) for line in lines[4:10]]
    assert names == [
        *("flat full", "flat float8_e4m3", "dedup full", "dedup float8_e4m3"),
        *("hierarchical full", "hierarchical float8_e4m3"),
    ]
    assert [line.split()[2] for line in lines[4:10]][-1] == "*"
    assert lines[8].split()[2:7] == ["5.29", "272.36", "394.68", "7", "7"]
    assert lines[11].startswith("chosen: hierarchical float8_e4m3: dispatch + combine take ")
    assert lines[12].startswith("without rounding: hierarchical full, ")
    assert len({len(line) for line in lines[3:10]}) == 1  # columns stand in line


def test_plan_as_json_holds_every_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *_V3, "--topology", "h800-deepep", "--payload", "full", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["topology"] == {"name": "h800-deepep", "nodes": 8, "gpus_per_node": 8}
    assert plan["choice"] == {"route": "hierarchical", "payload": "full"}
    assert [v["route"] for v in plan["variants"]] == ["flat", "dedup", "hierarchical"]
    chosen = plan["variants"][2]
    assert [m["movement"] for m in chosen["movements"]] == [
        *("dispatch", "combine", "dispatch_backward", "combine_backward"),
    ]
    assert [s["name"] for s in chosen["movements"][0]["stages"]] == [
        *("between nodes", "inside nodes"),
    ]
    seconds = sum(m["seconds"] for m in chosen["movements"])
    assert chosen["forward_s"] + chosen["backward_s"] == pytest.approx(seconds)


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*_V3, "--tokens", "128", "--dtype", "float32", "--nodes-per-token", "2", "--json"]
    assert main(["plan", *args]) == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert (workload["tokens_per_rank"], workload["dtype"]) == (128, "float32")
    assert workload["nodes_per_token"] == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--experts", "250"], "num_experts=250 cannot be shared evenly by ranks=64"),
        (["--topk", "300"], "topk=300 but num_experts=256"),
        (["--nodes", "0"], "nodes=0 must be at least 1"),
        (["--hidden", "-1"], "hidden_size=-1 must be at least 1"),
        (["--tokens", "0"], "tokens_per_rank=0 must be at least 1"),
        (["--tokens", "9" * 400], "too large"),
        (["--hidden", "9" * 400], "too large"),
    ],
)
def test_impossible_numbers_end_with_status_two(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *_V3, *args]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


@pytest.mark.parametrize("args", [_V3[:-2], [*_V3, "--topology", "abacus"], [*_V3, "--nodes", "x"]])
def test_misused_options_end_with_status_two(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *args])
    assert end.value.code == 2
    assert "comm-collectives plan: error: " in capsys.readouterr().err


def test_plan_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom comm_collectives.cli import main\n"
        f"assert main(['plan', *{_V3!r}]) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "chosen: hierarchical float8_e4m3" in done.stdout
