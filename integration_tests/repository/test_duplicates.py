from collections.abc import Callable

from gates.duplicates import check_duplicates
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]


def found(parse: Parse, *texts: str) -> str:
    files = {f"pkg/file{i}.py": text for i, text in enumerate(texts)}
    return as_text(check_duplicates(parse(files)))


def body(lines: int, name: str = "x") -> str:
    return "".join(f"{name}{i} = {i}\n" for i in range(lines))


def test_nine_lines_that_stand_twice_are_found_once(parse: Parse) -> None:
    report = found(parse, "import os\n" + body(9), "a = 1\n" + body(9) + "b = 2\n")
    assert report.count("\n") == 0
    assert "file0.py:2: 9 lines stand again at src/pkg/file1.py:2" in report


def test_eight_lines_may_stand_twice(parse: Parse) -> None:
    assert found(parse, body(8), body(8)) == ""


def test_indentation_comments_and_docstrings_do_not_hide_a_duplicate(parse: Parse) -> None:
    indented = "def f():\n    '''Other words.'''\n" + "".join(
        f"    x{i} =  {i}  # note {i}\n\n" for i in range(9)
    )
    assert "9 lines stand again" in found(parse, body(9), indented)


def test_imports_and_docstrings_are_no_duplicates(parse: Parse) -> None:
    shared = '"""' + "word\n" * 12 + '"""\n' + "".join(f"import m{i}\n" for i in range(12))
    assert found(parse, shared + "a = 1\n", shared + "b = 2\n") == ""


def test_a_duplicate_within_one_file_is_found(parse: Parse) -> None:
    assert "10 lines stand again" in found(parse, body(10) + "between = 0\n" + body(10))
