"""What every package promises of its face, its README and its errors, as checks for its tests.

They are given the package, and read nothing but its installed files and its README, so that they
hold for a wheel as well as for the checkout. Each raises AssertionError that names what is wrong.

    check_names(mesh_spmd)
    check_tour(mesh_spmd, README)
"""

import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


class Wrong:
    """A value of a type that nothing accepts."""


def check_names(package: ModuleType) -> None:
    """Every public name resolves and is documented; another name is an AttributeError."""
    if not package.__all__:
        raise AssertionError(f"{package.__name__} has no public names")
    bare = [n for n in package.__all__ if not getattr(getattr(package, n), "__doc__", None)]
    if bare:
        raise AssertionError(f"public names of {package.__name__} without docstring: {bare}")
    try:
        package.no_such_name  # noqa: B018 - the access is what is tried
    except AttributeError as error:
        if package.__name__ not in str(error) or "no_such_name" not in str(error):
            raise AssertionError(f"{error} does not say which package lacks which name") from error
    else:
        raise AssertionError(f"{package.__name__}.no_such_name is no error")


def check_import_is_cheap(package: ModuleType, *heavy: str) -> None:
    """Importing the package, in a new process, imports none of the heavy modules."""
    code = f"import sys, {package.__name__}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    if done.stdout.strip() != "[]":
        raise AssertionError(f"import {package.__name__} imports {done.stdout.strip()}")


def run_examples(page: Path, *, beginning: str = "") -> int:
    """Run every Python example of a page as printed; return how many there are.

    Of a page whose other blocks only show something, give the comment with which those that run
    begin: `run_examples(ARCHITECTURE, beginning="# example")`. Each runs in a namespace of its own;
    one that asks whether it is the program (`__main__`) runs as one, in a process of its own.
    """
    blocks = [
        b for b in _BLOCK.findall(page.read_text(encoding="utf-8")) if b.startswith(beginning)
    ]
    if not blocks:
        raise AssertionError(f"{page} has no example" + f" that begins with {beginning!r}")
    for block in blocks:
        if "__main__" in block:
            _run_script(block, page)
        else:
            exec(compile(block, str(page), "exec"), {"__name__": "readme"})
    return len(blocks)


def _run_script(text: str, page: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "example.py"
        script.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=folder
        )
    if done.returncode != 0:
        raise AssertionError(f"an example of {page} fails:\n{done.stderr}")


def check_tour(package: ModuleType, readme: Path) -> None:
    """The README has exactly one line for each room of the package, or each file where it has none.

    A line of the tour begins with the name: "- `router/` - which experts each token goes to". A
    line for a room that is not there is wrong too.
    """
    folder = Path(str(package.__file__)).parent
    rooms = sorted(f"{door.parent.name}/" for door in folder.glob("*/__init__.py"))
    entries = rooms or sorted(f.name for f in folder.glob("*.py") if not f.name.startswith("_"))
    told = re.findall(r"^\W*`([\w./]+)`", readme.read_text(encoding="utf-8"), re.MULTILINE)
    wrong = {entry: told.count(entry) for entry in entries if told.count(entry) != 1}
    if wrong:
        raise AssertionError(f"{readme.name}: lines of the tour for each room, not one: {wrong}")
    tour = re.findall(r"^\s*[-*] `([\w/]+/)`", readme.read_text(encoding="utf-8"), re.MULTILINE)
    gone = [room for room in tour if not (folder / room).is_dir()]
    if gone:
        raise AssertionError(f"{readme.name}: the tour has rooms that are not there: {gone}")


def check_name_table(package: ModuleType, readme: Path) -> None:
    """Every public name stands in the first column of a table of the README, and no other does.

    Several names may share a row: "| `save`, `load` | write and read a checkpoint |". The table is
    the one whose head says "| name |".
    """
    table = re.search(
        r"^\| name[^\n]*\n\|[-:| ]+\n((?:\|[^\n]*\n)+)",
        readme.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if table is None:
        raise AssertionError(f"{readme.name} has no table with the head `| name | ...`")
    told = [
        name
        for row in table[1].splitlines()
        for name in re.findall(r"`(\w+)[^`]*`", row.split("|")[1])
    ]
    if sorted(told) != sorted(package.__all__):
        missing, unknown = set(package.__all__) - set(told), set(told) - set(package.__all__)
        raise AssertionError(f"{readme.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")


def check_wrong_types(
    package: ModuleType,
    base: type[Exception],
    *,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    not_called: Iterable[str] = (),
) -> int:
    """Call every public callable with a value of a wrong type; return how many were called.

    Each has to raise `base` that is a TypeError or ValueError as well. Errors and warnings are not
    called.

    Args:
        package: whose public names are called.
        base: the package's own base class of errors.
        given: name -> arguments that are right, for calls that need some; all others are wrong.
        not_called: names that take nothing that could be wrong. It is an error to name one that
            is not public.
    """
    not_called = set(not_called)
    unknown = (not_called | set(given or {})) - set(package.__all__)
    if unknown:
        raise AssertionError(f"given or not_called name what is not public: {sorted(unknown)}")
    problems, called = [], 0
    for name in package.__all__:
        value = getattr(package, name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        if is_error or not callable(value) or name in not_called:
            continue
        called += 1
        problem = _call_wrongly(value, base, dict((given or {}).get(name, {})))
        if problem:
            problems.append(f"{name}: {problem}")
    if problems:
        raise AssertionError(f"{package.__name__}, wrong types:\n" + "\n".join(problems))
    return called


def _call_wrongly(
    function: Callable[..., Any], base: type[Exception], given: dict[str, Any]
) -> str:
    """Call it with `Wrong()` for every required parameter that is not given; what is wrong then."""
    positional, named = [], {}
    unknown = set(given) - set(inspect.signature(function).parameters)
    if unknown:
        return f"has no parameters {sorted(unknown)}, which are given"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        if not required and parameter.name not in given:
            continue
        value = given.get(parameter.name, Wrong())
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            positional.append(value)
    if not any(isinstance(v, Wrong) for v in (*positional, *named.values())):
        return "takes no argument that could be wrong; give one in `given`, or list it"
    try:
        function(*positional, **named)
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError, base) as error:
        found = type(error)
        if not isinstance(error, base):
            return f"{found.__name__}, not a {base.__name__}: {error}"
        if not str(error).strip():
            return f"{found.__name__} without a message"
        is_users = issubclass(found, TypeError | ValueError)
        return "" if is_users else f"{found.__name__} is no TypeError or ValueError: {error}"
    return "accepted"
