"""Bad and good samples for the gates, written to a folder and read as the gates read ours."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from gates.source import Source, read_sources


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[dict[str, str]], list[Source]]:
    """Write files (path below a new `src` -> text) and read them as one package's sources."""

    def write_and_read(files: dict[str, str]) -> list[Source]:
        for name, text in files.items():
            file = tmp_path / "src" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text))
        return read_sources([tmp_path / "src"], root=tmp_path)

    return write_and_read


@pytest.fixture
def good_wheel() -> dict[str, str]:
    """What a good wheel of the package a-b holds: name in the archive -> text."""
    info = "a_b-0.1.0.dist-info"
    return {
        "a_b/__init__.py": "",
        "a_b/py.typed": "",
        f"{info}/METADATA": "Name: a-b\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\n",
        f"{info}/entry_points.txt": "[console_scripts]\na-b = a_b.cli:main\n",
    }
