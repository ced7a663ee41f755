import ast
from collections.abc import Callable

from gates.rooms import check_rooms
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]

# A package whose room `top` stands on `base`, each with a door.
GOOD = {
    "p/__init__.py": "",
    "p/errors.py": "",
    "p/base/__init__.py": "from p.base.wire import send as send\n",
    "p/base/wire.py": "import p.errors\n",
    "p/top/__init__.py": "from p.top.job import run as run\n",
    "p/top/job.py": "from p.base import send\nfrom p.top.parts import part\nimport p\n",
    "p/top/parts.py": "from p import errors\n",
    "p/cli.py": "from p.top import run\n",
}


def found(parse: Parse, files: dict[str, str]) -> str:
    return as_text(check_rooms(parse(GOOD | files)))


def room(name: str, *imports: str) -> dict[str, str]:
    """A room of package p with one module, which imports the doors of the rooms given."""
    text = "".join(f"from p.{other} import x\n" for other in imports)
    return {f"p/{name}/__init__.py": f"from p.{name}.m import x as x\n", f"p/{name}/m.py": text}


def test_rooms_that_import_through_doors_have_no_problem(parse: Parse) -> None:
    assert found(parse, {}) == ""


def test_a_folder_of_21_files_is_found_and_one_of_20_is_not(parse: Parse) -> None:
    files = {f"p/base/m{i}.py": "" for i in range(18)}  # and wire.py and the door
    assert found(parse, files) == ""
    report = found(parse, files | {"p/base/m18.py": ""})
    assert "p/base:1: 21 Python files in a folder; at most 20" in report


def test_a_folder_without_a_door_is_found(parse: Parse) -> None:
    assert "p/rest/m.py:1: its folder has no __init__.py" in found(parse, {"p/rest/m.py": ""})


def test_an_import_past_a_door_is_found(parse: Parse) -> None:
    for statement in ("from p.base.wire import send", "import p.base.wire"):
        report = found(parse, {"p/top/job.py": f"\n{statement}\n"})
        assert "p/top/job.py:2: p.base.wire" in report
        assert "behind the door of p.base; import from p.base" in report


def test_an_import_past_a_door_is_found_in_functions_and_at_the_root(parse: Parse) -> None:
    late = "def main() -> None:\n    from p.top.job import run\n"
    assert "p/cli.py:2: p.top.job (run) lies behind" in found(parse, {"p/cli.py": late})


def test_a_module_taken_from_a_door_is_past_it_unless_the_door_exports_it(parse: Parse) -> None:
    files = {"p/top/job.py": "from p.base import wire\n"}
    assert "behind the door" in found(parse, files)
    files["p/base/__init__.py"] = "from p.base import wire as wire\n"
    assert found(parse, files) == ""


def test_a_name_that_a_door_exports_is_taken_from_the_door_whatever_modules_are_called(
    parse: Parse,
) -> None:
    files = {"p/base/send.py": "", "p/base/__init__.py": "from p.base.send import send as send\n"}
    assert found(parse, files) == ""


def test_the_own_door_and_the_own_face_are_not_imported(parse: Parse) -> None:
    assert "the door of its own room (send)" in found(
        parse, {"p/base/more.py": "from p.base import send\n"}
    )
    assert "its own package's face (run)" in found(parse, {"p/base/more.py": "from p import run\n"})


def test_a_dotted_name_after_an_import_is_an_import_of_what_it_names(parse: Parse) -> None:
    assert found(parse, {"p/top/job.py": "import p\nx = p.__file__\n"}) == ""
    assert "p.base.wire (send) lies behind" in found(
        parse, {"p/top/job.py": "import p\nx = p.base.wire.send()\n"}
    )
    assert "its own package's face (run)" in found(parse, {"p/top/job.py": "import p\np.run()\n"})
    assert "p.base.wire (send) is a module of another" in found(
        parse, {"q/a.py": "import p as library\nlibrary.base.wire.send()\n"}
    )
    good = {"q/__init__.py": "", "q/a.py": "import p.base\np.base.send()\n"}
    assert found(parse, good) == ""


def test_another_package_is_entered_by_its_face_or_a_door(parse: Parse) -> None:
    good = {"q/__init__.py": "from p.top import run\n", "q/a.py": "import p\nfrom p import run\n"}
    assert found(parse, good) == ""
    assert "p.errors (E) is a module of another package" in found(
        parse, {"q/a.py": "from p.errors import E\n"}
    )
    assert "p.top.job (run) is a module of another" in found(
        parse, {"q/a.py": "from p.top.job import run\n"}
    )


def test_a_face_enters_rooms_by_their_doors(parse: Parse) -> None:
    text = "from p.top.job import run as run\n"
    stub = Source(path="src/p/__init__.pyi", module="p", text=text, tree=ast.parse(text))
    report = as_text(check_rooms(parse(GOOD), [stub]))
    assert "p/__init__.pyi:1: p.top.job (run) lies behind" in report


def test_a_circle_of_rooms_is_found_though_no_modules_form_one(parse: Parse) -> None:
    files = {"p/base/more.py": "from p.top import run\n"}
    report = found(parse, files)
    assert "circle of folders: p.base -> p.top -> p.base" in report or "p.top -> p.base" in report
    assert "p/base/more.py:1" in report


def test_a_circle_through_a_module_at_the_root_is_found(parse: Parse) -> None:
    files = {"p/errors.py": "from p.base import send\n"}
    assert "circle of folders" in found(parse, files)


def test_a_circle_of_a_room_with_the_sub_room_of_another_is_found(parse: Parse) -> None:
    files = {
        "p/base/sub/__init__.py": "from p.base.sub.m import y as y\n",
        "p/base/sub/m.py": "from p.top import run\n",
    }
    assert "circle of rooms, sub-rooms counted" in found(parse, files)


def test_a_sub_room_is_entered_through_its_own_door(parse: Parse) -> None:
    files = {
        "p/base/sub/__init__.py": "from p.base.sub.m import y as y\n",
        "p/base/sub/m.py": "",
        "p/base/wire.py": "from p.base.sub import y\n",
    }
    assert found(parse, files | {"p/top/parts.py": "from p.base.sub import y\n"}) == ""
    assert "behind the door of p.base.sub" in found(
        parse, files | {"p/top/parts.py": "from p.base.sub.m import y\n"}
    )


def test_a_chain_of_nine_rooms_is_found_and_one_of_eight_is_not(parse: Parse) -> None:
    files = room("r0")
    for i in range(1, 8):
        files |= room(f"r{i}", f"r{i - 1}")
    assert found(parse, files) == ""
    report = found(parse, files | room("r8", "r7"))
    assert "chain of 9 rooms: p.r8 -> p.r7" in report and "at most 8" in report


def test_sub_rooms_and_modules_at_the_root_do_not_lengthen_a_chain(parse: Parse) -> None:
    files = room("r0")
    for i in range(1, 8):
        files |= room(f"r{i}", f"r{i - 1}")
    files |= room("r7/sub", "r6") | {"p/cli.py": "from p.r7 import x\n"}
    files["p/r7/m.py"] = "from p.r7.sub import x\n"
    files["p/r7/sub/__init__.py"] = "from p.r7.sub.m import x as x\n"
    assert found(parse, files) == ""
