"""Find the documents of a corpus, in an order that depends on their names only.

Invariant: a file is one document however many paths, folders or symbolic links lead to it, and the
same files give the same list on every machine and in every process.

    for document in find_documents(("python_stdlib",), extensions=(".py",)):
        print(document.name, document.size_bytes)
"""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_train.config import PYTHON_STDLIB
from moe_train.early_checks import corpus_matches
from moe_train.errors import TrainValueError
from moe_train.reading.formats import compression_of

_SKIPPED_DIRS = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file of the corpus.

    Attributes:
        name: path below the corpus folder, with the folder's own name in front, `/` between parts.
        path: where the file is on this machine.
        size_bytes: its size when it was found.
        mtime_ns: its time of change when it was found.
    """

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


def find_documents(
    corpus: Sequence[str],
    *,
    extensions: Sequence[str],
    max_bytes: int | None = None,
    place: str = "data",
) -> list[Document]:
    """The documents of a corpus, sorted by name within each entry.

    Args:
        corpus: `python_stdlib`, folders, files or globs. Folders are walked for files with one of
            the `extensions`, leaving out hidden folders and installed packages; files and what a
            glob matches are taken as named.
        extensions: endings such as `.py`; `*` takes every file.
        max_bytes: keep a sample of whole documents of at most this size in all; None keeps all.
            The sample is chosen by a hash of the names and has at least one document.
        place: the table of the configuration that names the corpus, for messages.

    Raises:
        FileNotFoundError: an entry names nothing.
        ValueError: an entry has no document of the given extensions.
    """
    seen: set[str] = set()
    documents: list[Document] = []
    for entry in corpus:
        found = list(_documents_of(entry, tuple(extensions), seen))
        # All files of an entry may have come with an earlier one; having none is a mistake.
        if not found and not any(_documents_of(entry, tuple(extensions), set())):
            if os.path.isfile(entry):
                raise TrainValueError(f"{place}.corpus {entry!r} is an empty file; name another")
            plain = (end for end in extensions if not compression_of(end))
            raise TrainValueError(
                f"{place}.corpus {entry!r} has no files ({', '.join(plain)}); set "
                f"{place}.extensions to the endings of your files{_endings_in(entry)}"
            )
        documents += sorted(found, key=lambda document: document.name)
    return documents if max_bytes is None else sample_documents(documents, max_bytes)


def name_hash(name: str) -> bytes:
    """A hash of a document's name that fixes its place in samples and splits on every machine."""
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _endings_in(entry: str) -> str:
    """The most frequent endings of the files in a folder, for a message."""
    if not os.path.isdir(entry):
        return ""
    files = _walk(Path(entry), ("*",), set(), "")
    found = Counter(os.path.splitext(document.name)[1] or "(none)" for document in files)
    return f" ({', '.join(end for end, _ in found.most_common(5)) or 'it is empty'})"


def _documents_of(entry: str, extensions: tuple[str, ...], seen: set[str]) -> Iterator[Document]:
    if entry == PYTHON_STDLIB:
        yield from _walk(Path(sysconfig.get_paths()["stdlib"]), extensions, seen, PYTHON_STDLIB)
        return
    matches = corpus_matches(entry)
    for match in matches:
        if match.is_dir():
            yield from _walk(match, extensions, seen, match.resolve().name)
        elif match.is_file():
            yield from _document(match, match.resolve().parent.name + "/" + match.name, seen)


def _walk(
    folder: Path, extensions: tuple[str, ...], seen: set[str], name: str
) -> Iterator[Document]:
    """Documents below `folder`; links are followed, but each real folder is entered once."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda item: item.name)
    for item in entries:
        item_name = f"{name}/{item.name}"
        if item.is_dir():
            if item.name not in _SKIPPED_DIRS and not item.name.startswith("."):
                yield from _walk(folder / item.name, extensions, seen, item_name)
        elif item.is_file() and ("*" in extensions or item.name.endswith(extensions)):
            yield from _document(folder / item.name, item_name, seen)


def _document(path: Path, name: str, seen: set[str]) -> Iterator[Document]:
    real = os.path.realpath(path)
    if real in seen:
        return
    seen.add(real)
    status = os.stat(real)
    if status.st_size:
        yield Document(
            name=name, path=Path(real), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns
        )


def sample_documents(documents: list[Document], max_bytes: int) -> list[Document]:
    """Whole documents in the order of their names' hashes, each that still fits."""
    room = max_bytes
    kept: set[Path] = set()
    for document in sorted(documents, key=lambda item: (name_hash(item.name), item.name)):
        if document.size_bytes <= room:
            room -= document.size_bytes
            kept.add(document.path)
    if not kept:
        kept = {min(documents, key=lambda item: (item.size_bytes, item.name)).path}
    return [document for document in documents if document.path in kept]
