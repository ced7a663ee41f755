import re
from pathlib import Path

import gpu_alloc

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(README), "exec"), {"__name__": "readme"})


def test_the_tour_names_every_source_file() -> None:
    text = README.read_text(encoding="utf-8")
    files = Path(str(gpu_alloc.__file__)).parent.glob("*.py")
    assert [file.name for file in files if f"`{file.name}`" not in text] == []


def test_the_configuration_table_names_every_key() -> None:
    from dataclasses import fields

    from gpu_alloc import AllocatorConfig

    text = README.read_text(encoding="utf-8")
    rows = dict(re.findall(r"\| `(\w+)` \| (\w+) \|", text))
    defaults = {f.name: str(f.default).lower() for f in fields(AllocatorConfig)}
    assert {key: rows.get(key) for key in defaults} == defaults
