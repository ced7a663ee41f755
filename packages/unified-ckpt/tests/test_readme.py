import re
from pathlib import Path

import unified_ckpt

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(README), "exec"), {"__name__": "readme"})


def test_the_tour_names_every_source_file() -> None:
    text = README.read_text(encoding="utf-8")
    files = Path(str(unified_ckpt.__file__)).parent.glob("*.py")
    assert [file.name for file in files if f"`{file.name}`" not in text] == []
