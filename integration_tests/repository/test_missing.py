"""The gate on what tests and benchmarks import."""

from collections.abc import Callable

from gates.missing import check_missing
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]
LIBRARY = {
    "p/__init__.py": "def __getattr__(name): ...\n",
    "p/room/__init__.py": "from p.room.part import take as take\n",
    "p/room/part.py": "LIMIT = 3\nif LIMIT:\n    def take(): ...\nclass Kept: ...\n",
}
FACE = {"p/__init__.py": "from p.room import take as take\n"}


def found(parse: Parse, text: str) -> str:
    return as_text(check_missing(parse({"b.py": text}), parse(LIBRARY), parse(FACE)))


def test_names_that_faces_doors_and_files_bind_are_there(parse: Parse) -> None:
    text = (
        "from p import take\nfrom p.room import part, take\nfrom p.room.part import LIMIT, Kept\n"
    )
    assert found(parse, text + "import p.room\np.room.take()\np.room.part.LIMIT\nimport os\n") == ""


def test_a_name_that_left_a_door_is_named_with_its_line(parse: Parse) -> None:
    report = found(parse, "import os\ndef late():\n    from p.room import Kept\n")
    assert report == "src/b.py:3: p.room has no Kept; import it from the file that defines it"
    assert "p.room.part has no gone" in found(parse, "from p.room.part import gone\n")
    assert "p has no Kept" in found(parse, "import p\np.Kept()\n")
