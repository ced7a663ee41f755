"""Budgets of size and habits of plain code, counted on the syntax tree.

The tails of size, the parameters and the hidden imports separate good code from bad; medians do
not. So these are maxima, plus one percentile against many functions just below the maximum.

Ruff checks some of the same habits; here none can be switched off by a `noqa`.
"""

import ast
import math
import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from gates.source import FunctionNode, Problem, Source

FILE_LINES = 400
FILE_LINES_WITH_REASON = 500
FUNCTION_LINES = 60
FUNCTION_LINES_P95 = 40
PARAMETERS = 7

# `Length: ...` in the module docstring says why a file may be longer than FILE_LINES.
_REASON = re.compile(r"^\s*Length: \S.{15,}", re.MULTILINE)
# Files that may import inside functions: commands answer --help without torch; adapters of CuPy
# and CUDA must not load either before they are asked to.
_LATE_IMPORTS = re.compile(r"(^|/)(cli|commands/\w+|\w*(cupy|cuda)\w*)\.py$")
_NOQA = re.compile(r"#\s*noqa\b(?P<codes>:\s*[A-Z]+[0-9]+(\s*,\s*[A-Z]+[0-9]+)*)?(?P<reason>.*)")


def check_budgets(sources: Iterable[Source]) -> list[Problem]:
    """Sizes, parameters, annotations and forbidden statements of every file."""
    problems: list[Problem] = []
    for source in sources:
        problems += _file_length(source)
        for function in source.functions():
            problems += _function(source, function)
        problems += _statements(source)
        problems += _private_torch(source)
        problems += _noqa_without_reason(source)
    return problems


def check_percentile(sources: Iterable[Source]) -> list[Problem]:
    """The 95th percentile of function length, package by package."""
    problems = []
    ordered = sorted(sources, key=lambda s: s.module.split(".")[0])
    for package, members in groupby(ordered, key=lambda s: s.module.split(".")[0]):
        lengths = sorted(
            (_length(function), f"{source.path}:{function.lineno}")
            for source in members
            for function in source.functions()
        )
        if not lengths:
            continue
        length, place = lengths[math.ceil(0.95 * len(lengths)) - 1]
        if length > FUNCTION_LINES_P95:
            path, line = place.rsplit(":", 1)
            problems.append(
                Problem(
                    path=path,
                    line=int(line),
                    message=f"the 95th percentile of function length in {package} is {length} "
                    f"lines; at most {FUNCTION_LINES_P95}: shorten its longest functions",
                )
            )
    return problems


def _length(function: FunctionNode) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _file_length(source: Source) -> Iterator[Problem]:
    count = len(source.lines)
    has_reason = _REASON.search(ast.get_docstring(source.tree) or "") is not None
    limit = FILE_LINES_WITH_REASON if has_reason else FILE_LINES
    if count > limit:
        yield Problem(
            path=source.path,
            line=1,
            message=f"{count} lines; at most {FILE_LINES}, or {FILE_LINES_WITH_REASON} with a line "
            "`Length: <the reason>` in the module docstring; split it by topic",
        )


def _function(source: Source, function: FunctionNode) -> Iterator[Problem]:
    def problem(message: str) -> Problem:
        return Problem(
            path=source.path, line=function.lineno, message=f"function `{function.name}` {message}"
        )

    if _length(function) > FUNCTION_LINES:
        yield problem(f"has {_length(function)} lines; at most {FUNCTION_LINES}")
    parameters = _parameters(function)
    if len(parameters) > PARAMETERS:
        yield problem(
            f"has {len(parameters)} parameters; at most {PARAMETERS}: group them in a dataclass"
        )
    bare = [p.arg for p in parameters if p.annotation is None]
    if bare:
        yield problem(f"has arguments without annotation: {', '.join(bare)}")
    if function.returns is None:
        yield problem("has no return annotation")


def _parameters(function: FunctionNode) -> list[ast.arg]:
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    if named and named[0].arg in ("self", "cls", "mcs"):
        named = named[1:]
    return named + [extra for extra in (a.vararg, a.kwarg) if extra is not None]


def _statements(source: Source) -> Iterator[Problem]:
    for node in ast.walk(source.tree):
        message = _forbidden(node)
        if message is not None:
            yield Problem(path=source.path, line=getattr(node, "lineno", 1), message=message)
    if _LATE_IMPORTS.search(source.path):
        return
    late = {
        node.lineno
        for function in source.functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    for line in sorted(late):
        yield Problem(
            path=source.path,
            line=line,
            message="import inside a function; import at the top "
            "(only cli.py, commands/ and the CuPy and CUDA adapters may import late)",
        )


def _private_torch(source: Source) -> Iterator[Problem]:
    """Imports of private names of torch anywhere but in the package's one adapter module."""
    if source.path.endswith("/_torch_private.py"):
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (prefix + alias.name for alias in node.names):
            if re.match(r"torch\..*\b_(?!_)", name):
                yield Problem(
                    path=source.path,
                    line=node.lineno,
                    message=f"private torch name {name}; import it in _torch_private.py, "
                    "the one module that an upgrade of torch has to check",
                )


def _forbidden(node: ast.AST) -> str | None:
    match node:
        case ast.Assert():
            return "assert in src; raise ValueError, TypeError or the package's own error"
        case ast.Global():
            return "`global` in src; pass the state as an argument"
        case ast.ExceptHandler(type=None):
            return "bare except; name what is expected"
        case ast.ExceptHandler() if _is_blind(node.type) and not _reraises(node):
            return "except that swallows everything; name what is expected, or raise at its end"
    return None


def _is_blind(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in names)


def _reraises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _noqa_without_reason(source: Source) -> Iterator[Problem]:
    for comment in source.comments() if "noqa" in source.text else ():
        match = _NOQA.search(comment.string)
        if match and (match["codes"] is None or not re.search(r"\w{2}", match["reason"])):
            yield Problem(
                path=source.path,
                line=comment.start[0],
                message="noqa without a code and a reason; write `# noqa: CODE - why`",
            )
