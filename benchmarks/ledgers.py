"""What long counts came to, kept by source, so that they gather over runs and days.

A ledger is a JSON object in `results/ledgers/`: the name of a part or run -> what it came to, with
a hash of the source that decides it, as that stands in git or as Python reads it (`program_of`).
Who reads it sees which entries are of the source of today; several processes may add at once.

    ledger = Ledger(LEDGERS / "comm-collectives-pairs.json", source_of(ROOT, "packages/a/src"))
    ledger.keep("3/8", {"cells": 2100, "bad": {}})
    ledger.of_today()                    # {"3/8": {"cells": 2100, "bad": {}, "source": ...}}
"""

import ast
import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEDGERS = ROOT / "benchmarks" / "results" / "ledgers"


@dataclass(frozen=True)
class Ledger:
    """Entries of one file; `source` is that of today."""

    file: Path
    source: str

    def entries(self) -> dict[str, dict[str, Any]]:
        """All entries, also those of another source."""
        return json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}

    def of_today(self) -> dict[str, dict[str, Any]]:
        """The entries of the source of today."""
        return {k: e for k, e in self.entries().items() if e["source"] == self.source}

    def keep(self, name: str, entry: dict[str, Any]) -> None:
        """Add an entry of today's source, or replace the one of this name."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
            entries = self.entries() | {name: entry | {"source": self.source}}
            written = self.file.with_suffix(".new")
            written.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", "utf-8")
            written.replace(self.file)
        finally:
            os.close(folder)


def source_of(root: Path, *paths: str, without: Collection[str] = ()) -> str:
    """Return a hash of files in git, folders named in `without` left out.

    Raises:
        ValueError: they have changes that are in no commit, or there is no git.
    """

    def git(*command: str) -> str:
        told = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        if told.returncode:
            raise ValueError(f"counts are kept by their source in git: {told.stderr.strip()}")
        return told.stdout

    left_out = [f":(exclude)**/{folder}/**" for folder in without]
    changed = git("status", "--porcelain", "--", *paths, *left_out)
    if changed:
        raise ValueError(f"commit these first, since counts are kept by source:\n{changed}")
    files = git("ls-tree", "-r", "HEAD", "--", *paths).splitlines()
    counted = [f for f in files if not set(without) & set(f.partition("\t")[2].split("/"))]
    return hashlib.sha1("\n".join(counted).encode()).hexdigest()[:16]


def program_of(root: Path, files: Iterable[Path]) -> str:
    """Return a hash of what Python reads in these files: no comments, docstrings or blanks count.

    Names below `root` count, so that a moved file is another one.
    """
    hashed = hashlib.sha1()
    for file in sorted(files):
        tree = ast.parse(file.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                is_text = [isinstance(s, ast.Expr) and _is_text(s.value) for s in node.body]
                node.body = [s for s, text in zip(node.body, is_text, strict=True) if not text]
        hashed.update(f"{file.relative_to(root).as_posix()}\n{ast.unparse(tree)}\n".encode())
    return hashed.hexdigest()[:16]


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
