from collections.abc import Callable

import pytest

from gates.repeats import check_repeats
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]

SMALL = """
def aligned(n: int, unit: int = 8) -> int:
    rest = n % unit
    return n + unit - rest if rest else n
"""
# The same with other names, types and words.
CLONE = '''
def _round_up(size, to=8):
    """Round up."""
    left = size % to
    return size + to - left if left else size
'''


def found(parse: Parse, files: dict[str, str]) -> str:
    return as_text(check_repeats(parse(files)))


@pytest.mark.parametrize("kind", ["def check() -> int: {}", "class check: x = {}", "check = {}"])
def test_a_name_in_three_modules_is_found_and_one_in_two_is_not(parse: Parse, kind: str) -> None:
    files = {f"p/{m}.py": kind.format(i) + "\n" for i, m in enumerate("ab")}
    assert found(parse, files) == ""
    report = found(parse, files | {"p/room/c.py": kind.format(3) + "\n"})
    assert "p/room/c.py:1: `check` is defined in 3 modules of p (also a, b)" in report


def test_names_of_two_packages_and_of_methods_are_their_own(parse: Parse) -> None:
    files = {"p/a.py": "x = 1\n", "p/b.py": "x = 2\n", "q/a.py": "x = 3\n"}
    assert found(parse, files) == ""
    assert found(parse, {f"p/{m}.py": f"class {m}:\n    x = 1\n" for m in "abc"}) == ""


def test_what_each_module_needs_for_itself_is_free(parse: Parse) -> None:
    text = "T = TypeVar('T')\nlogger = logging.getLogger(__name__)\n__all__ = []\n"
    assert found(parse, {f"p/{m}.py": text for m in "abc"}) == ""


def test_overloads_are_one_definition(parse: Parse) -> None:
    assert found(parse, {"p/a.py": "def f() -> None: ...\n" * 3}) == ""


def test_a_constant_in_two_modules_is_found(parse: Parse) -> None:
    report = found(parse, {"p/a.py": "_POLL_S = 0.05\n", "p/b.py": "\n_POLL_S: float = 0.05\n"})
    assert "p/b.py:2: `_POLL_S` with the same value stands at src/p/a.py:1 too" in report
    assert found(parse, {"p/a.py": "_POLL_S = 0.05\n", "p/b.py": "_POLL_S = 0.1\n"}) == ""


def test_a_small_function_in_two_modules_is_found_whatever_its_words(parse: Parse) -> None:
    report = found(parse, {"p/a.py": SMALL, "p/b.py": CLONE})
    assert "p/b.py:2: `aligned` and `_round_up` with the same body stands at src/p/a.py:2" in report


def test_a_method_that_stands_in_two_modules_is_found(parse: Parse) -> None:
    method = (
        "class {}:\n    def f(self) -> bool:\n        return any(p.search(k) for p in self._all)\n"
    )
    assert "`f` with the same body" in found(
        parse, {f"p/{m}.py": method.format(m.upper()) for m in "ab"}
    )


def test_functions_that_do_other_things_or_next_to_nothing_are_free(parse: Parse) -> None:
    other = SMALL.replace("aligned", "padded").replace("n + unit", "n - unit")
    assert found(parse, {"p/a.py": SMALL, "p/b.py": other, "q/a.py": SMALL}) == ""
    other_default = SMALL.replace("aligned", "padded").replace("8", "16")
    assert found(parse, {"p/a.py": SMALL, "p/b.py": other_default}) == ""
    assert found(parse, {f"p/{m}.py": f"def {m}(x): return x.y\n" for m in "ab"}) == ""


def test_a_repetition_is_kept_with_a_reason(parse: Parse) -> None:
    reason = "# gate: clone - the file is loaded without the package\n"
    assert found(parse, {"p/a.py": SMALL, "p/b.py": reason + CLONE.lstrip()}) == ""
    same = "# gate: same-name - each shape of a call has its own\ndef main() -> int: return {}\n"
    plain = {f"p/{m}.py": f"def main() -> int: return {i}\n" for i, m in enumerate("ab")}
    assert found(parse, plain | {"p/c.py": same.format(3)}) == ""
    assert "excuses nothing" in found(parse, plain | {"p/c.py": same.replace("main", "run")})
