from collections.abc import Callable

from gates.cycles import check_cycles
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]


def found(parse: Parse, files: dict[str, str]) -> str:
    return as_text(check_cycles(parse(files)))


def test_a_tree_of_imports_has_no_cycle(parse: Parse) -> None:
    files = {"p/__init__.py": "", "p/a.py": "from p import b, c\n", "p/b.py": "import p.c\n"}
    assert found(parse, files | {"p/c.py": "import os\n"}) == ""


def test_a_cycle_at_the_top_is_found_and_named(parse: Parse) -> None:
    files = {"p/a.py": "from p.b import x\n", "p/b.py": "import p.a\n"}
    report = found(parse, files)
    assert "p.a -> p.b -> p.a" in report or "p.b -> p.a -> p.b" in report


def test_a_cycle_inside_functions_is_found(parse: Parse) -> None:
    late = "def f():\n    from p.{} import g\n"
    assert "import cycle" in found(parse, {"p/a.py": late.format("b"), "p/b.py": late.format("a")})


def test_relative_imports_count(parse: Parse) -> None:
    files = {"p/__init__.py": "from .a import x\n", "p/a.py": "from . import b\n"}
    assert "p.a -> p.b" in found(parse, files | {"p/b.py": "from .a import y\n"})


def test_a_name_from_a_door_counts_as_what_the_door_imports(parse: Parse) -> None:
    files = {"p/__init__.py": "from p.plan import Plan as Plan\n", "p/plan.py": "import p.parts\n"}
    assert "import cycle" in found(parse, files | {"p/parts.py": "from p import Plan\n"})


def test_each_of_two_cycles_is_told(parse: Parse) -> None:
    files = {
        "p/a.py": "import p.b\n",
        "p/b.py": "import p.a\n",
        "p/c.py": "import p.d\n",
        "p/d.py": "import p.c\n",
    }
    assert found(parse, files).count("import cycle") == 2
