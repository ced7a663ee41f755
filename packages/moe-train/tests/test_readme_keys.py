"""The README shows every key; `python test_readme_keys.py` writes the table anew."""

import json
from pathlib import Path

from moe_train.config.keys import KeyInfo, keys_of
from moe_train.config.tables import NAMED_TABLES, all_keys

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- keys:begin -->\n", "<!-- keys:end -->"


def row(key: KeyInfo) -> str:
    default = "required" if key.required else "optional"
    if not key.required and key.default is not None:
        default = f"`{json.dumps(key.default)}`"
    return f"| `{key.full_name}` | {default} | {key.on_resume} | {key.help} |\n"


def table() -> str:
    return "| key | default | on resume | meaning |\n|---|---|---|---|\n" + "".join(
        map(row, [*all_keys(), *(key for t in NAMED_TABLES.values() for key in keys_of(t))])
    )


def test_the_readme_shows_every_key_with_its_default_and_meaning() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == table()


if __name__ == "__main__":
    before, after = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(before + BEGIN + table() + END + after.split(END)[1], encoding="utf-8")
