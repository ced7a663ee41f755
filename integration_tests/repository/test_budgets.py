from collections.abc import Callable

import pytest

from gates.budgets import check_budgets, check_percentile
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]


def found(parse: Parse, text: str, name: str = "pkg/topic.py") -> str:
    return as_text(check_budgets(parse({name: text})))


def test_plain_code_has_no_problem(parse: Parse) -> None:
    text = '''
        """A topic."""
        import math

        def area(radius: float, *, scale: float = 1.0) -> float:
            """The area of a circle."""
            try:
                return math.pi * radius**2 * scale
            except OverflowError as error:
                raise ValueError(f"radius={radius} is too large") from error
    '''
    assert found(parse, text) == ""


@pytest.mark.parametrize(("lines", "bad"), [(400, False), (401, True)])
def test_a_file_has_400_lines_at_most(parse: Parse, lines: int, bad: bool) -> None:
    assert ("lines; at most 400" in found(parse, "x = 1\n" * lines)) is bad


@pytest.mark.parametrize(("lines", "bad"), [(500, False), (501, True)])
def test_a_file_may_have_500_lines_with_a_reason(parse: Parse, lines: int, bad: bool) -> None:
    head = '"""A table.\n\nLength: the table of all operators reads best in one piece.\n"""\n'
    text = head + "x = 1\n" * (lines - head.count("\n"))
    assert ("lines; at most 400" in found(parse, text)) is bad


def test_a_file_of_more_than_400_lines_needs_more_than_the_word(parse: Parse) -> None:
    assert "at most 400" in found(parse, '"""Length: x"""\n' + "x = 1\n" * 420)


@pytest.mark.parametrize(("lines", "bad"), [(60, False), (61, True)])
def test_a_function_has_60_lines_at_most(parse: Parse, lines: int, bad: bool) -> None:
    text = "def f() -> None:\n" + "    x = 1\n" * (lines - 1)
    assert ("has 61 lines; at most 60" in found(parse, text)) is bad


def test_the_95th_percentile_of_function_length_is_held(parse: Parse) -> None:
    short = "".join(f"def s{i}() -> None:\n    pass\n" for i in range(18))
    long = "".join(f"def l{i}() -> None:\n" + "    x = 1\n" * 40 for i in range(2))
    assert "95th percentile" in as_text(
        check_percentile(parse({"pkg/a.py": short, "pkg/b.py": long}))
    )
    more = "".join(f"def m{i}() -> None:\n    pass\n" for i in range(30))
    assert not check_percentile(parse({"pkg/c.py": more}))


def test_a_function_has_seven_parameters_at_most(parse: Parse) -> None:
    names = ", ".join(f"p{i}: int" for i in range(6))
    good = f"class C:\n    def f(self, {names}, *args: int) -> None: ...\n"
    assert found(parse, good) == ""
    assert "8 parameters" in found(parse, good.replace("*args", "*, q: int, **kwargs"))


def test_every_argument_and_return_is_annotated(parse: Parse) -> None:
    text = "def f(a, b: int, *c, **d):\n    return a\n"
    report = found(parse, text)
    assert "without annotation: a, c, d" in report
    assert "no return annotation" in report


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("assert x", "assert in src"),
        ("global y", "`global` in src"),
        ("try:\n        x()\n    except:\n        raise", "bare except"),
        ("try:\n        x()\n    except Exception:\n        pass", "swallows everything"),
        ("try:\n        x()\n    except (KeyError, BaseException):\n        pass", "swallows"),
        ("import json", "import inside a function"),
        ("from json import loads", "import inside a function"),
    ],
)
def test_a_forbidden_statement_is_found(parse: Parse, statement: str, message: str) -> None:
    assert message in found(parse, f"def f(x: int) -> None:\n    {statement}\n")


def test_an_exception_that_is_raised_again_is_not_swallowed(parse: Parse) -> None:
    text = """
        def f() -> None:
            try:
                g()
            except BaseException:
                h()
                raise
    """
    assert found(parse, text) == ""


@pytest.mark.parametrize("name", ["pkg/cli.py", "pkg/cupy_memory.py", "pkg/_cuda_source.py"])
def test_commands_and_adapters_may_import_late(parse: Parse, name: str) -> None:
    assert found(parse, "def f() -> None:\n    import json\n", name) == ""


@pytest.mark.parametrize("comment", ["# noqa", "# noqa: E501", "# noqa: E501 -"])
def test_a_noqa_needs_a_code_and_a_reason(parse: Parse, comment: str) -> None:
    assert "noqa without" in found(parse, f"x = 1  {comment}\n")
    assert found(parse, 'x = "# noqa"  # noqa: RUF001 - the sign is meant\n') == ""


@pytest.mark.parametrize(
    "statement", ["import torch._C", "from torch.utils._pytree import x", "from torch.nn import _y"]
)
def test_private_torch_names_are_imported_in_the_adapter_alone(
    parse: Parse, statement: str
) -> None:
    assert "private torch name" in found(parse, statement)


def test_the_adapter_may_import_private_torch_names(parse: Parse) -> None:
    assert found(parse, "from torch.distributed import _a\n", "p/_torch_private.py") == ""


def test_public_torch_names_are_free(parse: Parse) -> None:
    assert found(parse, "import torch.nn\nfrom torch import __version__\n") == ""
