import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from weight_convert.cli import main

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize(
    ("guide", "title"),
    [
        ("weight-convert.md", "Files for each rank"),
        ("weight-convert.zh.md", "为每个 rank 准备文件"),
    ],
)
def test_the_commands_of_the_guide_run(
    oracle: Any,
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    guide: str,
    title: str,
) -> None:
    text = (DOCS / guide).read_text(encoding="utf-8").partition(f"## {title}\n")[2]
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    model.write(Path("Qwen3-30B-A3B"), "transformers", num_files=2)
    for line in block[1].splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    assert "equal: " in capsys.readouterr().out
    assert oracle.read_folder(tmp_path / "whole") == model.fused, model.seed
