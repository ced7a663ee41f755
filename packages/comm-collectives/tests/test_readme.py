"""The README's example runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

_README = Path(__file__).parents[1] / "README.md"


def test_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", _README.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
