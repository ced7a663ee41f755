"""Nothing that ties the repository to one machine: package index hosts, or absolute paths.

A registry host in a file sends every user's installer there; an absolute path of the author's
machine works nowhere else. `uv.lock` names hosts by its nature and is left out.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from gates.source import Problem

LEFT_OUT = ("uv.lock",)
_HOSTS = re.compile(
    r"\b(?:files\.pythonhosted\.org|(?:test\.)?pypi\.org|registry\.npmjs\.org"
    r"|(?:deb|security)\.debian\.org|download\.pytorch\.org|(?:extra-)?index[-_]url)\b"
)
_PATHS = re.compile(
    r"(?:^|(?<![\w.~$})\]/-]))/(?:root|home|work|farm|opt|tmp|mnt|Users)/(?=[\w.$<{*])"
)


def tracked_files(root: Path) -> list[Path]:
    """The files of the checkout that git tracks, those named in LEFT_OUT excepted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and name not in LEFT_OUT]
    return [root / name for name in names if (root / name).is_file()]


def check_tracked(files: Iterable[Path], *, root: Path) -> list[Problem]:
    """Index hosts and machine paths in the text files given; binary files are passed over."""
    problems = []
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, start=1):
            for pattern, what in ((_HOSTS, "package index"), (_PATHS, "machine path")):
                match = pattern.search(line)
                if match:
                    problems.append(
                        Problem(
                            path=file.relative_to(root).as_posix(),
                            line=number,
                            message=f"{what} `{match.group()}` in a tracked file; remove it",
                        )
                    )
    return problems
