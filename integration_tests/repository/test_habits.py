from collections.abc import Callable
from textwrap import indent

import pytest

from gates.habits import check_habits
from gates.source import Source, as_text

Parse = Callable[[dict[str, str]], list[Source]]

CLASS = "class Executor:\n    pass\n"


def found(parse: Parse, text: str, others: dict[str, str] | None = None) -> str:
    return as_text(check_habits(parse({"p/m.py": text} | (others or {}))))


def in_function(text: str, name: str = "f") -> str:
    return f"def {name}(x: int) -> None:\n{indent(text, '    ')}\n"


def test_plain_code_has_no_finding(parse: Parse) -> None:
    text = """
        from dataclasses import dataclass, replace

        _KNOWN: dict[int, int] = {}

        @dataclass(frozen=True)
        class Plan:
            words: tuple[int, ...]

            def __post_init__(self) -> None:
                object.__setattr__(self, "words", tuple(self.words))

        def f(plan: Plan, n: int, *args: Plan, **sizes: int) -> Plan:
            _KNOWN[n] = max(*plan.words, *args, **{**sizes, "default": 0})
            return replace(plan, words=plan.words[:n])
    """
    assert found(parse, text) == ""


def test_keywords_of_any_kind_are_found(parse: Parse) -> None:
    report = found(parse, "def save(path: str, **request: Any) -> None: ...\n")
    assert "p/m.py:1: `**request` of `save` takes anything" in report
    assert "gate: any-keywords - why" in report
    assert "takes anything" in found(parse, "def save(**request: object) -> None: ...\n")


def test_a_function_that_hands_a_whole_call_on_may_take_any_keywords(parse: Parse) -> None:
    text = "def call(f: Callable[..., int], *args: Any, **kwargs: Any) -> int: ...\n"
    assert found(parse, text) == ""
    assert found(parse, "def f(*a: P.args, **k: P.kwargs) -> None: ...\n") == ""


@pytest.mark.parametrize(
    "text", ['x = (*("a", "b"), "c")', "f(*[1, 2])", "x = [*(f, g)]", 'f(**{"a": 1})']
)
def test_a_splat_of_a_display_is_found(parse: Parse, text: str) -> None:
    assert "packs items to unpack them again" in found(parse, text + "\n")


@pytest.mark.parametrize(
    "text", ["x = (*y, 1)", "f(*a[1:])", 'f(**{"a-b": 1})', 'x = {**y, "a": 1}', "f(**y)"]
)
def test_other_splats_are_free(parse: Parse, text: str) -> None:
    assert found(parse, text + "\n") == ""


@pytest.mark.parametrize(
    ("state", "change"),
    [
        ("_STEP = [0]", "_STEP[0] = x"),
        ("_STEP = [0]", "_STEP[0] += x"),
        ("_STEP: list[int] = [0]", "y, _STEP[0] = x, x"),
        ("_STEP = {'now': 0}", "_STEP['now'] = x"),
        ("_STEP = Position()", "_STEP.now = x"),
        ("_STEP = Position()", "_STEP.now, y = x, x"),
    ],
)
def test_state_of_a_module_is_found(parse: Parse, state: str, change: str) -> None:
    report = found(parse, f"{state}\n{in_function(change)}")
    assert "changes the state of the whole module" in report and "p/m.py:3" in report


def test_a_memo_and_a_local_name_are_no_state_of_the_module(parse: Parse) -> None:
    assert found(parse, "_KNOWN = {}\n" + in_function("_KNOWN[x] = 1")) == ""
    assert found(parse, "step = [0]\n" + in_function("step = [1]\nstep[0] = x")) == ""


@pytest.mark.parametrize("make", ["Executor()", "p.m.Executor(1)", "Executor.of(x)"])
def test_an_attribute_set_after_construction_is_found(parse: Parse, make: str) -> None:
    text = in_function(f"executor = {make}\nexecutor.fused = True")
    report = found(parse, text, {"p/other.py": CLASS})
    assert "p/m.py:3: `executor.fused` is set after `Executor` was made" in report


def test_attributes_of_foreign_classes_and_of_the_own_kind_are_free(parse: Parse) -> None:
    text = in_function("thread = threading.Thread()\nthread.daemon = True")
    assert found(parse, text, {"p/other.py": CLASS}) == ""
    linked = in_function("tail = Block()\ntail.before = self", "split")
    assert found(parse, "class Block:\n" + indent(linked, "    ")) == ""


def test_setattr_is_found_outside_of_constructors(parse: Parse) -> None:
    for call in ("setattr(x, name, 1)", "object.__setattr__(x, name, 1)"):
        assert "in `f`; build the object" in found(parse, in_function(call))
        for name in ("__init__", "__post_init__"):
            assert found(parse, in_function(call, name)) == ""


@pytest.mark.parametrize("head", ["_HEAD = 7", "_A, _HEAD = range(2)", "_A = 1\n_HEAD = _A + 1"])
@pytest.mark.parametrize("use", ["words[_HEAD]", "words[line + _HEAD]", "words[0, 1][_HEAD + 1]"])
def test_a_position_that_codes_a_meaning_is_found(parse: Parse, head: str, use: str) -> None:
    assert "codes a meaning by its position" in found(parse, f"{head}\nx = {use}\n")


def test_a_position_that_comes_from_another_module_is_found(parse: Parse) -> None:
    report = found(parse, "from p.base import HEAD\nx = y[HEAD]\n", {"p/base/m.py": "HEAD = 7\n"})
    assert "the place `HEAD` codes" in report


@pytest.mark.parametrize(
    "use", ["words[:_HEAD]", "words[rank * _HEAD]", "words[_KEY]", "words[x != _HEAD]"]
)
def test_sizes_and_keys_are_no_positions(parse: Parse, use: str) -> None:
    assert found(parse, f"_HEAD = 7\n_KEY = 'a'\nx = {use}\n") == ""


@pytest.mark.parametrize("error", ["ValueError", "TypeError"])
def test_a_plain_error_is_found(parse: Parse, error: str) -> None:
    assert f"raise {error}; raise the package's own" in found(parse, f"raise {error}('x')\n")
    assert "plain-error" in found(parse, f"raise {error}\n")
    assert found(parse, "raise PlanValueError('x')\n") == ""


@pytest.mark.parametrize(
    "line",
    [
        "x = 1  # see tests/call/test_calls.py",
        "x = 'tests/data'",
        '"""As test_a_rank_that_is_late_is_named shows."""',
        "def f() -> None: test_all()",
        "# the fixture of conftest.py",
    ],
)
def test_a_test_that_code_names_is_found(parse: Parse, line: str) -> None:
    assert "names a test; say what holds" in found(parse, line + "\n")


@pytest.mark.parametrize("line", ["x = latest_step", "# the tests of torch", "x = attest(1)"])
def test_other_words_name_no_test(parse: Parse, line: str) -> None:
    assert found(parse, line + "\n") == ""


def test_a_finding_is_kept_with_a_reason(parse: Parse) -> None:
    line = "raise ValueError('x')"
    reason = "# gate: plain-error - json tells this class from others"
    assert found(parse, f"{line}  {reason}\n") == ""
    assert found(parse, f"{reason}\n{line}\n") == ""
    assert found(parse, f"{reason}\n# and from nothing else\n{line}\n") == ""
    assert "plain-error" in found(parse, f"x = 1\n{reason}\nx = 1\n{line}\n")


def test_a_reason_in_the_head_of_a_file_is_meant_for_all_of_it(parse: Parse) -> None:
    text = '"""A table."""\n\n# gate: splat - rows of a table, a line each\n\nimport os\n'
    assert found(parse, text + "x = (*(1, 2),)\ny = (*(3, 4),)\n") == ""


def test_a_comment_without_reason_excuses_nothing(parse: Parse) -> None:
    report = found(parse, "raise ValueError('x')  # gate: plain-error\n")
    assert "without a reason" in report and "raise the package's own" in report


def test_a_comment_that_excuses_nothing_is_found(parse: Parse) -> None:
    assert "excuses nothing here" in found(parse, "x = 1  # gate: splat - rows of a table\n")
    assert "`gate: splats` is no code" in found(parse, "x = 1  # gate: splats - rows of it\n")
    assert found(parse, "x = '# gate: splats - this is text'\n") == ""
