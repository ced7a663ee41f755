"""`git log --follow` finds the past of the files that rooms hold, though all of them moved.

The history begins at the commit that made the first room. A checkout without it is passed over.
"""

import subprocess

import pytest

from workspace import ROOT

FIRST_ROOM = "packages/comm-collectives/src/comm_collectives/base/__init__.py"
PACKAGES = ("comm-collectives", "moe-pipeline", "moe-train", "unified-ckpt")


def git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def moved() -> str:
    """The commit that made the first room."""
    added = git("log", "--diff-filter=A", "--format=%H %P", "--", FIRST_ROOM)
    commit, *parents = added[-1].split() if added else [""]
    if not parents or git("rev-parse", "--is-shallow-repository") == ["true"]:
        pytest.skip("this checkout has no history from before the rooms")
    return commit


def changes(*revisions: str) -> list[list[str]]:
    """Kind and paths of each change of a Python file of src, renames found, the oldest first."""
    shown = ("--name-status", "--format=", "--reverse", *revisions, "--", "packages")
    fields = [line.split("\t") for line in git("log", "-M", *shown) if line]
    return [f for f in fields if "/src/" in f[-1] and f[-1].endswith(".py")]


def pasts(moved: str) -> dict[str, str]:
    """Each file of src that stood before the rooms: its path today -> its path then."""
    before = git("ls-tree", "-r", "--name-only", f"{moved}^", "packages")
    past = {path: path for path in before if "/src/" in path and path.endswith(".py")}
    for kind, *paths in changes(f"{moved}^..HEAD"):
        then = past.pop(paths[0], None)
        if then is not None and kind != "D":
            past[paths[-1]] = then
    return {path: then for path, then in past.items() if (ROOT / path).is_file()}


def test_every_file_that_moved_into_a_room_is_a_rename(moved: str) -> None:
    kinds = [kind[0] for kind, *_ in changes(f"{moved}^..{moved}")]
    assert kinds.count("R") > 250
    assert kinds.count("D") == 0


def test_nearly_every_file_of_then_stands_today(moved: str) -> None:
    """A seventh may be gone: comm-collectives' engine and weight-convert's families are new."""
    before = git("ls-tree", "-r", "--name-only", f"{moved}^", "packages")
    then = {p for p in before if "/src/" in p and p.endswith(".py") and "__init__" not in p}
    gone = then - set(pasts(moved).values())
    assert len(then) > 250
    assert len(gone) <= len(then) // 7, sorted(gone)


@pytest.mark.parametrize("package", PACKAGES)
def test_git_log_follow_goes_back_to_the_flat_folder(moved: str, package: str) -> None:
    folder = f"packages/{package}/src/"
    flat = {f: p for f, p in pasts(moved).items() if f.startswith(folder) and p.count("/") == 4}
    file, then = min((f, p) for f, p in flat.items() if f.count("/") > 4)
    lines = git("log", "--follow", "--name-status", "--format=", f"{moved}^..HEAD", "--", file)
    assert lines[-1].split("\t")[1:2] == [then]
