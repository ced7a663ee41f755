import re
from pathlib import Path

import moe_pipeline

README = Path(__file__).parents[1] / "README.md"


def test_readme_example_runs():
    text = README.read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(block, str(README), "exec"), {"__name__": "readme"})


def test_tour_names_every_source_file():
    text = README.read_text(encoding="utf-8")
    folder = Path(str(moe_pipeline.__file__)).parent
    for path in folder.glob("*.py"):
        assert f"`{path.name}`" in text, path.name
