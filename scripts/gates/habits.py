"""Tricks that meet a budget's number and miss its point, as far as a program can see them.

Each finding has a code; a comment `# gate: CODE - why` keeps the line where it is right
(`gates/reasons.py`).

| code | what is found | what to write instead |
|---|---|---|
| any-keywords | `**options: Any` without `*args: Any` beside it | the arguments, or a dataclass |
| splat | `*("a", "b")`, `**{"a": 1}` | the items themselves |
| module-state | `_STATE[0] = x`, `_STATE.x = y` on a name of the module | an argument, a field |
| late-attribute | `executor = Executor(...)`, `executor.x = y` | an argument of the class |
| setattr | `setattr` and `object.__setattr__` outside of `__init__` | a constructor |
| position | `words[_HEAD]` with `_HEAD = 7` | a NamedTuple, or a dataclass |
| plain-error | `raise ValueError(...)` | a class of the package's errors.py |
| names-test | `tests/`, `test_x.py`, `test_x` in code, comment or text | what holds, and why |
"""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator

from gates.reasons import Finding, without_reason
from gates.source import FunctionNode, Problem, Source

_Found = Iterator[tuple[int, str, str]]  # line, code, message
_TEST = re.compile(r"\btest_[a-z]\w*|\btests/\w*|\bconftest\b")
_BUILDERS = ("__init__", "__post_init__", "__new__", "__setstate__")


def check_habits(sources: Iterable[Source]) -> list[Problem]:
    """Every trick in these files that carries no reason."""
    sources = list(sources)
    classes = {node.name for s in sources for node in s.tree.body if isinstance(node, ast.ClassDef)}
    integers = {name for s in sources for name in _integers(s.tree)}
    packages = {source.module.split(".")[0] for source in sources}
    found = []
    for source in sources:
        tricks = [*_splats(source.tree), *_plain_errors(source.tree), *_tests(source)]
        positions = _integers(source.tree) | integers & _taken(source.tree, packages)
        tricks += _positions(source.tree, positions)
        held = _held(source.tree)
        for function, owner in _functions(source.tree):
            tricks += _any_keywords(function)
            tricks += _module_state(function, held)
            tricks += _late_attributes(function, classes - {owner} - set(dir(builtins)))
            tricks += _setattr(function)
        found += [
            Finding(code=code, source=source, line=line, message=message)
            for line, code, message in dict.fromkeys(tricks)
        ]
    return without_reason("habits", sources, found)


def _functions(tree: ast.Module) -> Iterator[tuple[FunctionNode, str]]:
    """Every function with the name of the class that it stands in; inner functions with theirs."""

    def inside(node: ast.AST, owner: str) -> Iterator[tuple[FunctionNode, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode):
                yield child, owner
            yield from inside(child, child.name if isinstance(child, ast.ClassDef) else owner)

    return inside(tree, "")


def _any_keywords(function: FunctionNode) -> _Found:
    rest, keywords = function.args.vararg, function.args.kwarg
    if keywords is None or not _is_any(keywords) or (rest is not None and _is_any(rest)):
        return  # `*args: Any, **kwargs: Any` hands somebody's whole call on
    yield (
        keywords.lineno,
        "any-keywords",
        f"`**{keywords.arg}` of `{function.name}` takes anything; write the arguments out, "
        "or give them as one dataclass",
    )


def _is_any(argument: ast.arg) -> bool:
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id in ("Any", "object")


def _splats(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        match node:
            case ast.Starred(value=ast.Tuple() | ast.List() as packed):
                pass
            case ast.keyword(arg=None, value=ast.Dict() as packed) if _are_words(packed.keys):
                pass
            case _:
                continue
        yield (
            packed.lineno,
            "splat",
            f"`*{ast.unparse(packed)[:40]}` packs items to unpack them again; write the items "
            'themselves (many words: `"a b c".split()`)',
        )


def _are_words(keys: list[ast.expr | None]) -> bool:
    """Whether all keys of a dict display could be written as keywords of a call."""
    return all(
        isinstance(k, ast.Constant) and isinstance(k.value, str) and k.value.isidentifier()
        for k in keys
    )


def _module_state(function: FunctionNode, held: set[str]) -> _Found:
    """Assignments to a part of what stands at the module's top.

    A memo (`_KNOWN[key] = value`) is none: its key is no constant.
    """
    local = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)} | {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for target in _targets(function):
        is_part = isinstance(target, ast.Attribute) or isinstance(target.slice, ast.Constant)
        if is_part and isinstance(target.value, ast.Name) and target.value.id in held - local:
            yield (
                target.lineno,
                "module-state",
                f"`{ast.unparse(target)} = ` changes the state of the whole module, as `global` "
                "would; pass the state as an argument, or keep it in an object's field",
            )


def _held(tree: ast.Module) -> set[str]:
    """Names at the top of a module whose value can be changed in its parts."""
    shapes = ast.List | ast.Dict | ast.Call
    return {name for name, value in _constants(tree) if isinstance(value, shapes)}


def _late_attributes(function: FunctionNode, classes: set[str]) -> _Found:
    made: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            called = ast.walk(node.value.func)  # `Class(...)`, `module.Class(...)`, `Class.of(...)`
            names = {getattr(n, "id", getattr(n, "attr", "")) for n in called}
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (t.id for t in targets if isinstance(t, ast.Name)):
                if names & classes:
                    made[name] = min(names & classes)
    for target in _targets(function):
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            name = target.value.id
            if name in made:
                yield (
                    target.lineno,
                    "late-attribute",
                    f"`{name}.{target.attr}` is set after `{made[name]}` was made; "
                    "give it to the constructor",
                )


def _setattr(function: FunctionNode) -> _Found:
    if function.name in _BUILDERS:
        return
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="setattr")):
                name = "setattr"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="object"), attr="__setattr__")):
                name = "object.__setattr__"
            case _:
                continue
        yield (
            node.lineno,
            "setattr",
            f"`{name}` in `{function.name}`; build the object with its values, "
            "or with `dataclasses.replace`",
        )


def _targets(function: FunctionNode) -> Iterator[ast.Attribute | ast.Subscript]:
    """The attributes and items that a function assigns to."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield node


def _positions(tree: ast.Module, integers: set[str]) -> _Found:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript):
            continue
        terms = {n.id for n in _terms(node.slice) if isinstance(n, ast.Name)}
        for name in sorted(terms & integers):
            yield (
                node.lineno,
                "position",
                f"`{ast.unparse(node)}`: the place `{name}` codes a meaning by its position; "
                "use a NamedTuple, a dataclass or an array for each meaning",
            )


def _terms(node: ast.expr) -> Iterator[ast.expr]:
    """The terms of a sum; another expression is its own only term."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _terms(node.left)
        yield from _terms(node.right)
    else:
        yield node


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The names assigned at the top of a module, with their values."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name):
                        yield name.id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def _integers(tree: ast.Module) -> set[str]:
    """Names at the top whose value is written with integers alone: `7`, `_A + 1`, `range(4)`."""
    found: set[str] = set()
    for name, value in _constants(tree):
        leaves = [n for n in ast.walk(value) if isinstance(n, ast.Constant | ast.Name)]
        plain = all(
            type(n.value) is int if isinstance(n, ast.Constant) else n.id in found | {"range"}
            for n in leaves
        )
        shape = ast.Constant | ast.UnaryOp | ast.BinOp | ast.Tuple | ast.Name
        is_range = isinstance(value, ast.Call) and ast.unparse(value.func) == "range"
        if plain and leaves and (isinstance(value, shape) or is_range):
            found.add(name)
    return found


def _taken(tree: ast.Module, packages: set[str]) -> set[str]:
    """The names that a module imports from our own packages."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.level > 0 or (node.module or "").split(".")[0] in packages)
        for alias in node.names
    }


def _tests(source: Source) -> _Found:
    """What is installed lies without its tests, which move and are renamed."""
    for number, line in enumerate(source.lines, start=1):
        for found in _TEST.finditer(line):
            yield (
                number,
                "names-test",
                f"`{found.group()}` names a test; say what holds, and let the test name the code",
            )


def _plain_errors(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise):
            continue
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(error, ast.Name) and error.id in ("ValueError", "TypeError"):
            yield (
                node.lineno,
                "plain-error",
                f"raise {error.id}; raise the package's own class that is a {error.id} too "
                "(errors.py)",
            )
