"""Every check of the repository, as nox sessions; `uv run nox` runs those that need no GPU.

    uv run nox                        # lint, each package's wheel alone, seams, end to end, summary
    uv run nox -s mesh-spmd           # one package
    uv run nox -s mesh-spmd -- -k box # with arguments for pytest
    uv run nox -t wheel               # all packages
    uv run nox -s claims -- gpu-alloc # measure what is claimed
    uv run nox -s device              # tests marked gpu, on devices made of CPU memory
    uv run nox -s gpu                 # tests and benchmarks that need a CUDA device
    uv run nox -s oldest              # all packages on the oldest torch that they promise

A package's session proves what a shared environment cannot: the built wheel, installed with what it
declares and nothing else, from the versions in uv.lock, passes its tests in a folder that holds no
source. What is imported without being declared fails there.
"""

import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

from workspace import Package, gpu_test_files, read_packages  # noqa: E402 - the path is set just above

PACKAGES = read_packages(ROOT)
REPORTS = ROOT / ".nox" / "reports"
OLDEST_TORCH = "2.11"
HELPERS = ("ranktest", "devicetest")  # of tests, in testing/; they are not published
# The sessions whose tests are added up, in the order in which they run.
TESTED = ("lint", *(p.name for p in PACKAGES), "seams", "end_to_end", "device")

nox.needs_version = ">=2025.11"
nox.options.default_venv_backend = "uv"
nox.options.sessions = [*TESTED, "summary"]
nox.options.error_on_missing_interpreters = True

os.environ.setdefault("UV_LINK_MODE", "hardlink")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, types, layers, budgets, workflows, claims; and the tests of these gates."""
    workflows = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob(".github/workflows/*.yml"))
    sources = [f"packages/{p.folder.name}/src" for p in PACKAGES]
    sources += [f"testing/{name}/src" for name in HELPERS]
    with tempfile.TemporaryDirectory(prefix="wheels-") as wheels:
        checks: dict[str, tuple[str, ...]] = {
            "ruff check": ("ruff", "check", "."),
            "ruff format": ("ruff", "format", "--check", "."),
            "mypy": ("mypy", *sources, "scripts", "noxfile.py"),
            "import-linter": ("lint-imports", "--no-cache"),
            "zizmor": ("zizmor", "--offline", "--no-progress", *workflows),
            "check-jsonschema": (
                "check-jsonschema",
                "--builtin-schema",
                "vendor.github-workflows",
                *workflows,
            ),
            "figures in the READMEs": ("python", "scripts/run_claims.py", "--check-readmes"),
            "wheels": ("uv", "build", "--all-packages", "--wheel", "--quiet", "-o", wheels),
            "gates": ("python", "scripts/run_gates.py", "--wheels", wheels),
        }
        failed = [name for name, command in checks.items() if not _check(session, command)]
    _report(session).write_text(json.dumps({"failed_checks": failed}))
    _workspace_tests(session, "integration_tests/repository", "testing", failed_checks=failed)


def _register(package: Package) -> None:
    def wheel(session: nox.Session) -> None:
        _test_wheel(session, package, torch=None)

    wheel.__doc__ = f"Build the wheel of {package.name}, install it alone, run its tests."
    nox.session(name=package.name, tags=["wheel"])(wheel)


for _package in PACKAGES:
    _register(_package)


_KILLED_WHILE_COMPUTING = "test_a_killed_run_that_computes_goes_on_and_gives_the_same_files"


@nox.session(venv_backend="none")
def seams(session: nox.Session) -> None:
    """Tests in which two real packages meet, or one meets a library that it can do without."""
    # The wheel session of gpu-alloc has neither CuPy nor torch: the package has to work alone.
    tests = ROOT / "packages/gpu-alloc/tests"
    with_both = [f for room in ("cupy", "torch") for f in sorted((tests / room).glob("test_*.py"))]
    with_both += [
        tests / "cli/test_record.py",
        tests / "cli/test_run.py",
        tests / "trace/test_torch_snapshot.py",
    ]
    with_both.append(tests / "test_docstrings.py")
    tests = ROOT / "packages/weight-convert/tests"  # alone it has no torch, which computing needs
    for room in ("adapters", "compute", "opinions", "merging", "quantization"):
        with_both += sorted((tests / room).glob("test_*.py"))
    names = [str(f.relative_to(ROOT)) for f in with_both]
    names.append(f"{tests.relative_to(ROOT)}/run/test_execution.py::{_KILLED_WHILE_COMPUTING}")
    _workspace_tests(session, "integration_tests/seams", *names)


@nox.session(venv_backend="none")
def end_to_end(session: nox.Session) -> None:
    """The whole job: train, save, resume, load in transformers."""
    _workspace_tests(session, "integration_tests/end_to_end")


@nox.session(venv_backend="none")
def device(session: nox.Session) -> None:
    """The tests marked `gpu`, on testing/devicetest; each names what that cannot do for it."""
    files = sorted(str(file.relative_to(ROOT)) for file in gpu_test_files(ROOT))
    _workspace_tests(session, *files, marker="gpu", options=("--on-devicetest",))


@nox.session(venv_backend="none")
def summary(session: nox.Session) -> None:
    """Add up the sessions before this one and name what failed."""
    session.run("python", "scripts/summary.py", *TESTED, external=True)


@nox.session(venv_backend="none", default=False)
def claims(session: nox.Session) -> None:
    """Measure the claims of benchmarks/claims.toml; arguments as in scripts/run_claims.py."""
    _uv_run(session, "python", "scripts/run_claims.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """The tests and benchmarks that need a CUDA device."""
    _uv_run(session, "bash", "scripts/gpu_check.sh", *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", [p.name for p in PACKAGES], ids=[p.import_name for p in PACKAGES])
def oldest(session: nox.Session, package: str) -> None:
    """A package's wheel and tests on the oldest torch that it promises; needs the network."""
    chosen = next(p for p in PACKAGES if p.name == package)
    _test_wheel(session, chosen, torch=OLDEST_TORCH)


def _test_wheel(session: nox.Session, package: Package, *, torch: str | None) -> None:
    """Build, install alone, prove that it is alone, and test in a tree without source."""
    _report(session).unlink(missing_ok=True)
    declared = {package.name, *package.siblings}
    with tempfile.TemporaryDirectory(prefix=f"{package.name}-") as folder:
        tree = Path(folder)
        has_torch = _install(session, package, tree, torch)
        if torch is not None and not has_torch:
            session.skip(f"{package.name} does not depend on torch")
        _lay_out_tests(package, tree)
        with session.chdir(tree):
            session.run(
                "python",
                "check_install.py",
                package.import_name,
                "--siblings",
                *(p.import_name for p in PACKAGES if p.name in package.siblings),
                "--absent",
                *(p.import_name for p in PACKAGES if p.name not in declared),
            )
            session.run(*_pytest(session, f"packages/{package.name}/tests"), env=_test_env(session))


def _install(session: nox.Session, package: Package, tree: Path, torch: str | None) -> bool:
    """Install the locked dependencies and the built wheels; whether torch is among them.

    The dependencies are exported with the addresses and hashes of uv.lock, so that nothing is
    resolved again and an unchanged lock needs no network. Wheels of the siblings are built too and
    installed by path: a namesake in a package index can never take their place.
    """
    # An empty project: uv reads no settings and no workspace from the folder it works in.
    pylock = tree / "pylock.package.toml"
    _export(session, pylock, "--package", package.name)
    locked = tomllib.loads(pylock.read_text()).get("packages", [])
    has_torch = any(p["name"] == "torch" for p in locked)
    tools = tree / "pylock.tools.toml"
    # Test helpers need torch; a package that does without torch is tested without them.
    pruned = [word for name in HELPERS for word in ("--prune", name)]
    _export(session, tools, "--only-group", "test", *pruned)
    wheels = tree / "wheels"
    built = [package.name, *package.siblings, *(HELPERS if has_torch else ())]
    for name in built:
        command = ("uv", "build", "--quiet", "--wheel", "--package", name, "-o", str(wheels))
        session.run_install(*command, external=True, log=False)
        if name == "gpu-alloc" and any(map(shutil.which, ("c++", "g++", "clang++"))):
            session.run("python", str(ROOT / "scripts/native_wheel.py"), str(wheels), silent=True)
    files = sorted(str(f) for f in wheels.glob("*.whl"))
    for lock in (pylock, tools):
        session.install("--quiet", "--no-deps", "-r", str(lock))
    if torch is not None and has_torch:
        session.install(f"torch=={torch}.*")
    session.install("--no-deps", "--no-index", *files)
    session.run_install("uv", "pip", "check", "--quiet", external=True)
    return has_torch


def _export(session: nox.Session, target: Path, *selection: str) -> None:
    session.run_install(
        "uv",
        "export",
        "--quiet",
        "--frozen",
        "--no-emit-workspace",
        "--format",
        "pylock.toml",
        *selection,
        "-o",
        str(target),
        external=True,
        log=False,
    )


def _lay_out_tests(package: Package, tree: Path) -> None:
    """Copy what the tests read, at the same places as in the checkout, but no source."""
    source = ROOT / "packages" / package.folder.name
    target = tree / "packages" / package.name
    ignored = shutil.ignore_patterns("src", "__pycache__", ".*cache")
    shutil.copytree(source, target, ignore=ignored)
    for folder in ("examples", "docs"):  # whose commands tests run
        shutil.copytree(ROOT / folder, tree / folder, dirs_exist_ok=True)
    for file in ("pyproject.toml", "conftest.py", "scripts/check_install.py"):
        shutil.copy(ROOT / file, tree)
    (tree / "scripts").mkdir()  # where pyproject.toml says that tests find what they share
    shutil.copy(ROOT / "scripts" / "package_facts.py", tree / "scripts")


def _workspace_tests(
    session: nox.Session,
    *folders: str,
    failed_checks: Sequence[str] = (),
    marker: str = "not gpu",
    options: Sequence[str] = (),
) -> None:
    """Run tests in the workspace environment; checks that failed before fail the session too."""
    report = _report(session)
    report.unlink(missing_ok=True)
    command = _pytest(session, *options, *folders, marker=marker)
    passed = _check(session, command, env=_test_env(session))
    if failed_checks:
        fields = json.loads(report.read_text()) if report.is_file() else {}
        report.write_text(json.dumps(fields | {"failed_checks": list(failed_checks)}))
    failed = [*failed_checks, *([] if passed else ["pytest"])]
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def _pytest(session: nox.Session, *words: str, marker: str = "not gpu") -> tuple[str, ...]:
    # Two workers: many tests are one process that computes, or processes that wait for each other.
    # Each begins with one half of the files, and takes from the other's when it has done its own.
    workers = ("-n", "2", "--dist", "worksteal")
    return ("pytest", "-q", "-m", marker, *workers, *words, *session.posargs)


def _check(
    session: nox.Session, command: Sequence[str], env: dict[str, str | None] | None = None
) -> bool:
    """Run a command in the workspace environment; whether it succeeded."""
    prefix = () if command[0] == "uv" else ("uv", "run", "--frozen")
    try:
        session.run(*prefix, *command, env=env, external=True)
    except CommandFailed:
        return False
    return True


def _uv_run(session: nox.Session, *command: str) -> None:
    session.run("uv", "run", "--frozen", *command, external=True)


def _report(session: nox.Session) -> Path:
    REPORTS.mkdir(parents=True, exist_ok=True)
    return REPORTS / f"{session.name}.json"


def _test_env(session: nox.Session) -> dict[str, str | None]:
    # Tests start many interpreters; without bytecode each would compile all of torch again.
    bytecode = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": None}
    # Each of the two workers has its share of the cores: more threads would wait for each other.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}
    return {"TEST_REPORT": str(_report(session)), "PYTHONPATH": None, **bytecode, **threads}
