from collections.abc import Callable

from gates.doors import check_doors, check_faces
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]

DOOR = '"""Why it exists.\n\nMay import: no room.\n"""\n'


def found(
    parse: Parse, door: str, others: dict[str, str] | None = None, *, name: str = "p/room"
) -> str:
    """What is wrong with this door, among other files of package p."""
    return as_text(check_doors(parse({f"{name}/__init__.py": door} | (others or {}))))


def exports(count: int, module: str = "p.room.m", first: int = 0) -> str:
    return "".join(f"from {module} import x{i} as x{i}\n" for i in range(first, first + count))


def test_a_door_of_docstring_and_imports_has_no_problem(parse: Parse) -> None:
    assert found(parse, DOOR + exports(3)) == ""


def test_the_face_of_a_package_is_no_door(parse: Parse) -> None:
    assert found(parse, "x = 1\n", name="p") == ""


def test_a_docstring_of_eleven_lines_is_found(parse: Parse) -> None:
    door = '"""Why.\n' + "word\n" * 8 + 'May import: no room.\n"""\n'
    assert found(parse, door) == ""
    assert "docstring of 11 lines; at most 10" in found(parse, door.replace("Why", "Why\nmore"))


def test_a_docstring_without_the_rooms_that_it_may_import_is_found(parse: Parse) -> None:
    others = {"p/room/m.py": "from p.base import y\n", "p/base/__init__.py": DOOR}
    report = found(parse, '"""Why it exists."""\n', others)
    assert "without a line `May import: <rooms>`; today its files import: base" in report
    assert "today its files import: no room" in found(parse, "", {"p/room/m.py": ""})


def test_code_in_a_door_is_found(parse: Parse) -> None:
    assert found(parse, DOOR + "__all__ = ['x0']\n") == ""
    assert "__init__.py:5: a door holds its docstring" in found(parse, DOOR + "x = 1\n")
    assert "a door holds its docstring" in found(parse, DOOR + "def f() -> None: ...\n")


def test_a_door_of_13_names_is_found_and_one_of_12_is_not(parse: Parse) -> None:
    assert found(parse, DOOR + exports(12)) == ""
    assert "door of 13 names; at most 12" in found(parse, DOOR + exports(13))


def test_a_catalogue_may_have_24_names_if_it_is_listed_and_says_so(parse: Parse) -> None:
    says = DOOR.replace("May", "Catalogue: families.\nMay")
    listed = "moe_pipeline/families"
    assert found(parse, says + exports(24), name=listed) == ""
    assert "door of 25 names; at most 24" in found(parse, says + exports(25), name=listed)
    assert "a line `Catalogue:" in found(parse, DOOR + exports(13), name=listed)
    report = found(parse, says + exports(13))
    assert "is for the doors listed in" in report and "door of 13 names; at most 12" in report


def test_names_of_a_catalogue_do_not_count_in_another_door(parse: Parse) -> None:
    says = DOOR.replace("May", "Catalogue: families.\nMay")
    files = {
        "moe_pipeline/families/__init__.py": says + exports(13, "moe_pipeline.families.m"),
        "moe_pipeline/layer/__init__.py": DOOR.replace("no room", "families")
        + exports(13, "moe_pipeline.families")
        + exports(12, "moe_pipeline.layer.m", first=20),
    }
    assert as_text(check_doors(parse(files))) == ""
    files["moe_pipeline/layer/__init__.py"] += "from moe_pipeline.layer.m import y as y\n"
    assert "layer/__init__.py:1: door of 13 names" in as_text(check_doors(parse(files)))


def test_a_room_that_is_imported_and_not_named_is_found(parse: Parse) -> None:
    others = {"p/room/m.py": "\nfrom p.base import y\n", "p/base/__init__.py": DOOR}
    report = found(parse, DOOR, others)
    assert "does not name p.base, which is imported at src/p/room/m.py:2" in report
    assert found(parse, DOOR.replace("no room", "`base`"), others) == ""
    assert found(parse, DOOR.replace("no room", "all rooms below"), others) == ""
    two_lines = DOOR.replace("no room", "call for its types,\nand base")
    assert found(parse, two_lines, others) == ""


def test_a_sub_room_is_named_by_its_room_and_a_sibling_package_by_its_name(parse: Parse) -> None:
    others = {
        "p/room/m.py": "from p.base.sub import y\nfrom p.errors import e\n",
        "p/room/n.py": "from p.room.sub import z\nimport q.room\n",
        "p/errors.py": "",
        "p/room/sub/__init__.py": DOOR,
        "p/base/__init__.py": DOOR,
        "p/base/sub/__init__.py": DOOR,
        "q/__init__.py": "",
        "q/room/__init__.py": DOOR,
    }
    assert found(parse, DOOR.replace("no room", "base, q"), others) == ""
    report = found(parse, DOOR, others)
    assert "does not name p.base.sub" in report and "does not name q.room" in report
    assert "p.errors" not in report and "p.room.sub" not in report


def test_a_face_of_25_names_is_found_and_one_of_24_is_not(parse: Parse) -> None:
    assert as_text(check_faces(parse({"p/__init__.py": exports(24)}))) == ""
    assert "face of 25 names; at most 24" in as_text(
        check_faces(parse({"p/__init__.py": exports(25)}))
    )
