import pytest

from changed import changed_packages
from workspace import read_packages

PACKAGES = read_packages()
ALL = [p.name for p in PACKAGES]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ([], []),
        (["packages/moe-train/src/moe_train/training/loop.py"], ["moe-train"]),
        (["packages/mesh-spmd/README.md"], ["mesh-spmd", "moe-train"]),
        (
            ["packages/comm-collectives/src/comm_collectives/moe/dispatch_combine.py"],
            ["comm-collectives", "moe-pipeline", "moe-train"],
        ),
        (["docs/architecture.md", "README.md", "benchmarks/cli_help.py"], []),
        (["uv.lock"], ALL),
        (["noxfile.py"], ALL),
        (["testing/ranktest/src/ranktest/ranks.py"], ALL),
        ([".github/workflows/ci.yml"], ALL),
        (["packages/gpu-alloc/tests/core/test_pool.py", "conftest.py"], ALL),
    ],
)
def test_a_change_touches_its_package_and_those_above(files: list[str], names: list[str]) -> None:
    assert changed_packages(files, PACKAGES) == names
