import re
from pathlib import Path

import pytest

import moe_train

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(README), "exec"), {"__name__": "readme"})
    assert "def " in capsys.readouterr().out


def test_the_tour_names_every_source_file() -> None:
    text = README.read_text(encoding="utf-8")
    files = Path(str(moe_train.__file__)).parent.rglob("*.py")
    # Folders are named as a whole; their files speak for themselves.
    folders = ("model", "data")
    missing = [f.name for f in files if f"`{f.name}`" not in text and f.parent.name not in folders]
    assert missing == ["__init__.py"]
