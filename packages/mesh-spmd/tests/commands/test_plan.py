import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from mesh_spmd import FlatSpec, ProcessMesh, Spec, TensorSpec, Topology, plan_reshard
from mesh_spmd.cli import main

MESH = ProcessMesh((2, 4), ("dp", "ep"))
EXPERTS = Spec.from_axes(MESH, {"ep": Shard(0)})
RAGGED = Spec.from_axes(MESH, {"ep": Shard(0)}, sizes={"ep": (20, 0, 4, 40)})


def run(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    code = main(["plan", *line])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def rows(capsys: pytest.CaptureFixture[str], *line: str) -> list[dict[str, int | None]]:
    return [json.loads(row) for row in run(capsys, *line, "--json").splitlines()]


def test_bytes_of_each_rank_stand_beside_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dp=2,ep=2/ep=0", "dp=1,ep=4/ep=0", "--shape", "8,4", "--dtype", "float32"]
    out = run(capsys, *line).splitlines()
    assert out[0].split() == ["rank", "received", "limit", "sent", "blocks", "peak"]
    # Ranks 0 to 3 hold halves 0, 1, 0, 1 and want quarters 0 to 3: 1 and 2 lack theirs.
    assert [row.split()[:3] for row in out[1:5]] == [
        ["0", "0", "0"],
        ["1", "32", "32"],
        ["2", "32", "32"],
        ["3", "0", "0"],
    ]
    # A half and a quarter are held; what is allocated is the quarter, and what is received or sent.
    assert [row.split()[3:] for row in out[1:5]] == [
        ["16", "96", peak] for peak in ("48", "80", "80", "48")
    ]
    assert out[6] == "1 tensor(s) in 1 step(s) of 1 exchange(s)"
    assert out[7].startswith("busiest rank: 32 bytes received, 16 sent; 64 bytes in all")
    assert [row["received"] for row in rows(capsys, *line)] == [0, 32, 32, 0]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("dp=2,ep=4", Spec.from_axes(MESH, {})),
        ("dp=2,ep=4/ep=-2", Spec.from_axes(MESH, {"ep": Shard(-2)})),
        ("dp=2,ep=4/ep=0:20+0+4+40", RAGGED),
        (
            "dp=2,ep=4/dp=0,ep=0/order=ep,dp",
            Spec.from_dims(MESH, [("ep", "dp"), None]),
        ),
        ("dp=2,ep=4/flat=dp/ep=0:20+0+4+40", FlatSpec(RAGGED, ("dp",))),
        ("dp=2,ep=4/flat=ep,dp:0+1+2+3+4+5+6+43", None),
        ("dp=2,ep=4/dp=sum,ep=max", Spec.from_axes(MESH, {"dp": Partial(), "ep": Partial("max")})),
        (
            "dp=2,ep=4/ep=0/ranks=20,9-12,1-3",
            Spec.from_axes(
                ProcessMesh((2, 4), ("dp", "ep"), (20, 9, 10, 11, 12, 1, 2, 3)), {"ep": Shard(0)}
            ),
        ),
    ],
)
def test_every_kind_of_layout_is_planned_as_in_python(
    capsys: pytest.CaptureFixture[str], text: str, spec: Spec | FlatSpec | None
) -> None:
    if spec is None:
        spec = FlatSpec(Spec.from_axes(MESH, {}), ("ep", "dp"), sizes=(0, 1, 2, 3, 4, 5, 6, 43))
    shape = (64,) if isinstance(spec, FlatSpec) and spec.sizes else (64, 3)
    line = [text, "dp=2,ep=4/ep=0", "--shape", ",".join(map(str, shape))]
    source = TensorSpec(shape, torch.bfloat16, spec)
    plan = plan_reshard(source, TensorSpec(shape, torch.bfloat16, EXPERTS))
    assert (
        run(capsys, *line).splitlines()[-1] == f"plan {plan_reshard([source], plan.targets).hash}"
    )
    found = rows(capsys, *line)
    assert {row["rank"]: row["sent"] for row in found} == plan.sent_bytes
    assert {row["rank"]: row["peak"] for row in found} == plan.peak_bytes
    # What a rank wants and lacks, counted on a numbered tensor.
    numbered = torch.arange(source.numel).view(shape)
    for row in found:
        had, wanted = (elements(t, numbered, row["rank"]) for t in (source, plan.targets[0]))
        assert row["limit"] == (None if source.partials else 2 * len(wanted - had))


def elements(tensor: TensorSpec, numbered: torch.Tensor, rank: int | None) -> set[int]:
    if rank not in tensor.mesh.ranks:
        return set()
    begin, end = tensor.flat_range(rank)
    return set(numbered[tensor.box(rank).slices()].flatten()[begin:end].tolist())


def test_a_file_of_tensors_is_one_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    toml = tmp_path / "tensors.toml"
    toml.write_text(
        """
        [experts]
        shape = [64, 3]
        [moments]
        shape = [64, 3]
        dtype = "F32"
        source = "dp=2,ep=4/ep=0:20+0+4+40/flat=dp"
        target = "dp=2,ep=4/ep=0/flat=dp"
        """
    )
    out = run(capsys, "dp=2,ep=4/ep=0:20+0+4+40", "dp=2,ep=4/ep=0", "--tensors", str(toml))
    ends = [
        [TensorSpec((64, 3), torch.bfloat16, a), TensorSpec((64, 3), torch.float32, b)]
        for a, b in ((RAGGED, FlatSpec(RAGGED, ("dp",))), (EXPERTS, FlatSpec(EXPERTS, ("dp",))))
    ]
    plan = plan_reshard(*ends)
    assert out.splitlines()[-1] == f"plan {plan.hash}"
    assert "2 tensor(s) in 1 step(s)" in out
    listed = tmp_path / "tensors.json"
    listed.write_text(
        json.dumps(
            {
                name: {"shape": [64, 3], "dtype": dtype, "source": a, "target": b}
                for name, dtype, a, b in (
                    ("experts", "bfloat16", "dp=2,ep=4/ep=0:20+0+4+40", "dp=2,ep=4/ep=0"),
                    (
                        "moments",
                        "float32",
                        "dp=2,ep=4/ep=0:20+0+4+40/flat=dp",
                        "dp=2,ep=4/ep=0/flat=dp",
                    ),
                )
            }
        )
    )
    assert run(capsys, "--tensors", str(listed)).splitlines()[-1] == f"plan {plan.hash}"


def test_buffers_and_nodes_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dp=2,ep=4/ep=0", "dp=2,ep=4/ep=1", "--shape", "64,32"]
    peaks = [row["peak"] for row in rows(capsys, *line)]
    small = rows(capsys, *line, "--buffer-bytes", "200")
    assert all((row["peak"] or 0) - 1024 <= 200 + 2 * 2 * 7 for row in small)
    assert all(peak == 1024 + 2 * 768 for peak in peaks)
    source, target = (
        TensorSpec((64, 32), torch.bfloat16, Spec.from_axes(MESH, {"dp": Shard(d), "ep": Shard(d)}))
        for d in (0, 1)
    )
    steps = len(plan_reshard(source, target, Topology(ranks_per_node=2)).steps)
    line = ["dp=2,ep=4/dp=0,ep=0", "dp=2,ep=4/dp=1,ep=1", "--shape", "64,32"]
    out = run(capsys, *line, "--ranks-per-node", "2")
    assert f"in {steps} step(s) of " in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ep=2 ep=2/ep=0 --shape 4 --dtype real", "--dtype got 'real'; give a dtype of torch"),
        ("ep/ep=0 ep=2 --shape 4", "the source layout 'ep/ep=0': the mesh got 'ep'; write name="),
        ("ep=2 ep=2/0 --shape 4", "the target layout 'ep=2/0': got '0' where axis=dim must stand"),
        ("ep=2 ep=2/ep=x --shape 4", "behind ep= must stand a tensor dim, as in ep=0, or a reduc"),
        ("ep=2 ep=2/ep=0:1+x --shape 4", "the parts of ep, '1+x' (as in 20+0+44), got 'x'"),
        ("ep=2/ep=0:1+2 ep=2 --shape 4", "sizes (1, 2) add up to 3, but cut a piece of 4"),
        ("ep=2/ep=0:4 ep=2 --shape 4", "1 sizes were given for axis 'ep' of size 2"),
        ("ep=2/ep=sum:1+3 ep=2 --shape 4", "got 'ep=sum:1+3'"),
        ("ep=2/ep=0,ep=0 ep=2 --shape 4", "ep is placed twice in 'ep=0,ep=0'"),
        ("ep=2/ep=0/ep=1 ep=2 --shape 4", "two sections of shards: 'ep=0' and 'ep=1'; put a comma"),
        ("ep=2/order=ep/order=ep ep=2 --shape 4", "there are two sections order="),
        ("ep=2/flat= ep=2 --shape 4", "nothing stands behind flat=; leave the section out"),
        ("ep=2/order=tp ep=2 --shape 4", "the source layout 'ep=2/order=tp': unknown axis 'tp'"),
        ("ep=2/ep=0/flat=ep ep=2 --shape 4", "an axis that cuts the elements of a box must repl"),
        ("ep=2/flat=ep:1+2 ep=2 --shape 4", "sizes (1, 2) add up to 3"),
        ("ep=2/ranks=3-x ep=2 --shape 4", "ranks=3-x (as in 8-15) got 'x'"),
        ("ep=2/ranks=3-2 ep=2 --shape 4", "ranks=3-2 counts down in '3-2'; write 2-3"),
        ("ep=2/ranks=3 ep=2 --shape 4", "mesh shape (2,) holds 2 ranks, but 1 were given"),
        ("flat=2/flat=0 ep=2 --shape 4", "an axis is named 'flat', which begins a section here"),
        ("ep=2/ep=1 ep=2 --shape 4", "axis 'ep' shards dim 1, but the tensor has 1 dims"),
        ("ep=2 --shape 4", "the target layout is missing; give two"),
        ("ep=2 ep=2", "give one of --shape (one tensor) and --tensors (a file of them)"),
        ("ep=2 ep=2 --shape 4 --buffer-bytes 0", "buffer_bytes is 0"),
        ("ep=2 ep=2 --shape 4 --buffer-bytes 1G", "--buffer-bytes got '1G'"),
        (
            "ep=2 ep=2 --shape 4 --ranks-per-node 0",
            "ranks_per_node=0 of a Topology; give a number above 0",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert main(["plan", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("mesh-spmd: error: ") and message in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[w]\nshape = [4]\nsource = 3", "t.toml: w: the source layout is 3; write it as in"),
        ("[w]\nshape = [4]\nlayout = 'ep=2'", "w has layout; it may have shape, dtype, source"),
        ("[w]\nshape = 4", "t.toml: w has shape 4; expected a list of sizes"),
        ("[w]\nshape = [4]\ndtype = 'F4'", "t.toml: w: dtype got 'F4'; give a dtype of torch"),
        ("[w]\nshape = [4]\ntarget = 'ep=2/ep=1'", "w: the target layout 'ep=2/ep=1': axis 'ep'"),
        ("w = 3", "t.toml: w must be"),
        ("[w", "t.toml cannot be read"),
        ("", "holds no tensor"),
    ],
)
def test_mistakes_in_a_file_of_tensors_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "t.toml").write_text(content)
    assert main(["plan", "ep=2", "ep=2/ep=0", "--tensors", str(tmp_path / "t.toml")]) == 2
    assert message in capsys.readouterr().err


def test_a_layout_that_stands_nowhere_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "t.toml").write_text("[w]\nshape = [4]")
    assert main(["plan", "ep=2", "--tensors", str(tmp_path / "t.toml")]) == 2
    assert "t.toml: w has no target layout; give it there" in capsys.readouterr().err


def test_help_shows_every_kind_of_layout() -> None:
    code = "from mesh_spmd.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--help"], capture_output=True, text=True, timeout=120
    )
    for part in ("ep=0:20+0+4+40", "order=ep,dp", "flat=dp:100+28", "dp=sum", "ranks=8-15"):
        assert part in done.stdout
