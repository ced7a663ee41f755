"""Who imports whom among our own modules, anywhere in a file: in functions and for types as well.

    modules = Modules.of(sources, stubs)
    [use.target for use in modules.imports_of(source)]    # ["pkg.errors", "pkg.room"]

`from pkg.room import name` is an import of the module `pkg.room.name` if there is one and the door
of the room has no export of that name; otherwise of the door.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gates.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """An import of one of our modules: its line, the module, and the names taken from it.

    `import pkg.room` takes no names.
    """

    line: int
    target: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Modules:
    """All our modules by their dotted names, and what each door and face exports."""

    by_name: dict[str, Source]
    exports: dict[str, frozenset[str]]

    @classmethod
    def of(cls, sources: Iterable[Source], stubs: Iterable[Source] = ()) -> "Modules":
        """`stubs` are the `__init__.pyi` files: what a lazy `__init__.py` exports."""
        by_name = {source.module: source for source in sources}
        exports = {name: exported(s.tree) for name, s in by_name.items() if s.is_package}
        return cls(by_name, exports | {stub.module: exported(stub.tree) for stub in stubs})

    def imports_of(self, source: Source) -> Iterator[Use]:
        """Every import of one of our modules; `pkg.room.name` after `import pkg` is one as well."""
        roots: dict[str, str] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = self._nearest(alias.name)
                    if target is not None:
                        yield Use(line=node.lineno, target=target, names=())
                        bound = alias.asname or alias.name.split(".")[0]
                        roots[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom):
                yield from self._from_import(node, _absolute(node, source), source)
        if roots:
            yield from self._attributes(source, roots)

    def folder(self, module: str) -> str:
        """The folder of a module, as a dotted name; a door stands in the folder that it opens."""
        return module if self.by_name[module].is_package else module.rpartition(".")[0]

    def _attributes(self, source: Source, roots: dict[str, str]) -> Iterator[Use]:
        """What is taken from a module by its dotted name: `pkg.room.name`, `pkg.name`."""
        for node in ast.walk(source.tree):
            name, parts = node, list[str]()
            while isinstance(name, ast.Attribute):
                parts.insert(0, name.attr)
                name = name.value
            if not parts or not isinstance(name, ast.Name) or name.id not in roots:
                continue
            target = roots[name.id]
            while parts and self._is_module(target, parts[0]):
                target = f"{target}.{parts.pop(0)}"
            if target in self.by_name and parts and not parts[0].startswith("__"):
                yield Use(line=name.lineno, target=target, names=(parts[0],))

    def _is_module(self, base: str, name: str) -> bool:
        return f"{base}.{name}" in self.by_name and name not in self.exports.get(base, ())

    def _nearest(self, name: str) -> str | None:
        while name and name not in self.by_name:
            name = name.rpartition(".")[0]
        return name or None

    def _from_import(self, node: ast.ImportFrom, base: str, source: Source) -> Iterator[Use]:
        # A door that says `from pkg.room import part as part` means the module.
        exports = self.exports.get(base, frozenset()) if base != source.module else frozenset()
        taken: dict[str, list[str]] = {}
        for alias in node.names:
            module = f"{base}.{alias.name}"
            if module in self.by_name and alias.name not in exports:
                taken.setdefault(module, [])
            elif base in self.by_name:
                taken.setdefault(base, []).append(alias.name)
        for target, names in taken.items():
            yield Use(line=node.lineno, target=target, names=tuple(names))


def exported(tree: ast.Module) -> frozenset[str]:
    """The names that a door or a stub binds by its imports."""
    return frozenset(
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    )


def _absolute(node: ast.ImportFrom, source: Source) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    keep = len(parts) - node.level + (1 if source.is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])
