"""docs/weight-convert-formats.md says which formats a family has, and by whose code each is proved.

Run as a program, this file writes the page anew from the specs.
"""

from pathlib import Path

from weight_convert.specs import family_names, get_spec
from weight_convert.specs.family import Format

PAGE = Path(__file__).parents[3] / "docs" / "weight-convert-formats.md"
HEAD = """# Families and formats of weight-convert

Written by `python packages/weight-convert/tests/test_format_table.py` from the specs. A number
stands for the proof below: whose code, or whose published list of keys, shows that the files are
right, and the test that runs it. `experimental` is a format without one, which `weight-convert
convert` says. Every format of a family leads to every other one, in any kind of files: safetensors,
torch's `.bin`, Paddle's `.pdparams`, distributed checkpoints of torch.

"""


def page() -> str:
    """The page as the specs say it."""
    specs = [get_spec(name) for name in family_names()]
    columns: list[str] = []
    for spec in specs:
        columns += [name for name in spec.formats if name not in columns]
    proofs: list[str] = []

    def cell(form: Format | None) -> str:
        if form is None:
            return ""
        if not form.proof:
            return "experimental"
        if form.proof not in proofs:
            proofs.append(form.proof)
        return str(1 + proofs.index(form.proof))

    lines = [f"| family | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for spec in specs:
        cells = [cell(spec.formats.get(name)) for name in columns]
        lines.append(f"| `{spec.model_type}` | {' | '.join(cells)} |")
    told = [f"{number}. {proof}" for number, proof in enumerate(proofs, start=1)]
    return HEAD + "\n".join([*lines, "", *told]) + "\n"


def test_the_page_of_formats_is_what_the_specs_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run this file as a program"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
