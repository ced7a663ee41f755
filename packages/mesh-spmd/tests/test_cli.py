import json
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_spmd.cli import main


def run(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(line.split()) == 0
    return capsys.readouterr().out


def test_boxes_prints_one_line_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "boxes --mesh pp=2,ep=4 --shape 6,512 --place ep=0")
    lines = out.splitlines()
    assert lines[0].split() == ["rank", "pp", "ep", "offset", "shape", "elements"]
    assert lines[7].split("  ")[0].strip() == "6"
    assert "(4, 0)" in lines[7] and "(2, 512)" in lines[7] and lines[7].endswith("1,024")
    assert "(0, 512)" in lines[8]
    assert lines[-1] == (
        "8 ranks of ProcessMesh(pp=2, ep=4), 4 distinct boxes; "
        "elements in a box: 0 to 1,024; ranks that hold a box: 2"
    )


def test_boxes_as_json_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "boxes --mesh ep=4 --shape 6,512 --place ep=-2 --rank 1 --json")
    assert json.loads(out) == {
        "rank": 1,
        "coordinate": {"ep": 1},
        "offset": [2, 0],
        "shape": [2, 512],
    }


def test_boxes_of_a_scalar(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 distinct boxes" in run(capsys, "boxes --mesh ep=2 --shape=")


def test_groups_prints_the_ranks_of_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "groups --mesh pp=2,dp=2,ep=2 --axes ep,dp")
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["pp", "ranks"],
        ["0", "0", "1", "2", "3"],
        ["1", "4", "5", "6", "7"],
    ]
    line = run(capsys, "groups --mesh pp=2,ep=2 --axes pp --json").splitlines()[1]
    assert json.loads(line) == {"fixed": {"ep": 1}, "ranks": [1, 3]}


def test_place_shows_what_was_wanted_and_what_was_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "place --mesh dp=2,ep=4 --shape 60,512 --shard dp=0,ep=0"
    out = run(capsys, line)
    assert "does not divide: dp replicates" in out
    assert json.loads(run(capsys, line + " --json"))["shard"] == {"dp": None, "ep": 0}
    assert "all wanted shards fit" in run(capsys, line.replace("60", "64"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("boxes --mesh ep --shape 4", "--mesh got 'ep'; write name=number, as in ep=4"),
        ("boxes --mesh ep= --shape 4", "--mesh got 'ep='"),
        ("boxes --mesh ep=x --shape 4", "--mesh got 'x' where a whole number must stand"),
        ("boxes --mesh ep=0 --shape 4", "mesh shape[0] is 0"),
        ("boxes --mesh ep=2,ep=2 --shape 4", "--mesh names ep twice"),
        ("boxes --mesh ep=2 --shape 4,y", "--shape got 'y'"),
        ("boxes --mesh ep=2 --shape 4 --place tp=0", "unknown axis 'tp'; this mesh has ep"),
        ("boxes --mesh ep=2 --shape 4 --place ep=1", "shards dim 1, but the tensor has 1 dims"),
        ("boxes --mesh ep=2 --shape 4 --rank 2", "rank 2 is not in ProcessMesh(ep=2)"),
        ("groups --mesh ep=2 --axes=", "name one or more of ep"),
        ("place --mesh ep=4 --shape 6 --shard ep=0 --strict", "which does not divide by ep=4"),
    ],
)
def test_bad_input_ends_in_one_clear_line(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mesh-spmd: error: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_a_closed_pipe_is_not_an_error_message() -> None:
    start = "from mesh_spmd.cli import main; raise SystemExit(main())"
    arguments = "boxes --mesh ep=9999 --shape 1"
    command = f"{sys.executable} -c '{start}' {arguments} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.startswith("rank")


@pytest.mark.parametrize("arguments", ["--help", "boxes --help"])
def test_help_does_not_import_torch(arguments: str) -> None:
    code = (
        "import sys\nfrom mesh_spmd.cli import main\n"
        f"try:\n    main({arguments.split()!r})\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_layout_shows_a_state_dict_from_headers_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    experts = {"dtype": "BF16", "shape": [6, 4], "data_offsets": [0, 48]}
    norm = {"dtype": "F32", "shape": [5], "data_offsets": [48, 68]}
    table = {"__metadata__": {"format": "pt"}, "layers.0.experts.w": experts, "norm": norm}
    header = json.dumps(table).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(68)
    )
    line = f"layout {tmp_path} --mesh dp=2,ep=4 --rule *.experts.*:ep=0 --rule *:"
    out = run(capsys, line).splitlines()
    assert out[0].split()[:4] == ["tensor", "dtype", "shape", "cut"]
    assert "does not divide by ep=4: ep replicates" in out[1]
    assert out[2].split() == ["norm", "F32", "(5)", "replicated"]
    assert out[4] == "2 tensors, 68 bytes; 1 not cut as wanted"
    assert out[5] == "bytes on a rank: 68 (rank 0) to 68 (rank 0)"
    out = run(capsys, f"{line} --ragged --fallbacks").splitlines()
    assert "ep=0(2, 2, 1, 1)" in out[1] and out[1].endswith("ep is ragged") and len(out) == 5
    assert out[4] == "bytes on a rank: 28 (rank 2) to 36 (rank 0)"
    rows = [json.loads(row) for row in run(capsys, f"{line} --ragged --json").splitlines()]
    assert rows[0]["shard"] == {"dp": None, "ep": 0} and rows[0]["sizes"] == {"ep": [2, 2, 1, 1]}
    assert sum(rows[-1]["bytes_of_ranks"].values()) == 2 * 48 + 8 * 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"w": {"dtype": "BF16"}}', "w must be"),
        ('{"w": {"dtype": "X", "shape": [2]}}', "w has dtype 'X'; expected one of"),
        ('{"w": {"dtype": "F32", "shape": [-2]}}', "w has shape [-2]"),
        ("[]", "must hold a JSON object"),
        ("{", "cannot be read"),
        ("{}", "holds no tensor"),
        ('{"w": {"dtype": "F32", "shape": [2]}}', "no tensor follows the rules ['v']"),
    ],
)
def test_layout_names_what_is_wrong_with_a_list_of_shapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "shapes.json").write_text(content)
    line = ["layout", str(tmp_path / "shapes.json"), "--mesh", "ep=2", "--rule", "v:ep=0"]
    assert main(line) == 2
    assert message in capsys.readouterr().err


def test_layout_refuses_what_is_no_safetensors_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rules = ["--mesh", "ep=2", "--rule", "*:ep=0"]
    assert main(["layout", str(tmp_path), *rules]) == 2
    assert "has no *.safetensors" in capsys.readouterr().err
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 20)
    assert main(["layout", str(tmp_path), *rules]) == 2
    assert "it is no safetensors file" in capsys.readouterr().err
    assert main(["layout", str(tmp_path), "--mesh", "ep=2", "--rule", "ep=0"]) == 2


def test_nothing_is_said_about_numpy_where_it_is_not_installed() -> None:
    """It is no dependency, and torch warns of it when it is imported."""
    line = "boxes --mesh ep=2 --shape 4 --place ep=0"
    code = "import sys; sys.modules['numpy'] = None; import mesh_spmd.cli as cli; "
    code += f"cli.main({line.split()})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "2 distinct boxes" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    "line",
    [
        "plan ep=2/ep=--1 ep=2 --shape 4",
        "plan dp=2,ep=2/ep=0/flat=dp dp=2,ep=2 --shape 99999999999999999999",
        "plan ep=2/ep=0 ep=2 --shape 8589934592,8589934592",
        "boxes --mesh ep=99999999999999999999 --shape 4",
        "plan dp=2/ranks=0-9999999999 dp=2 --shape 4",
        "plan dp=2/dp=sum dp=2 --shape 4 --dtype float8_e4m3fn",
    ],
)
def test_what_no_machine_holds_is_refused_with_a_message(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith("mesh-spmd: ")
