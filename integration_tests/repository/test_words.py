import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from gates.source import Source, as_text
from gates.words import check_spellings, check_words
from workspace import Package

Parse = Callable[[dict[str, str]], list[Source]]

GLOSSARY = """
# Glossary

## Words of the whole repository

| word | meaning |
| --- | --- |
| axis | a dimension of a mesh |

## a-b

| word | meaning |
| --- | --- |
| `save`, `load` | write and read a checkpoint |
| `files/` | the room of file formats |
"""
STUB = "from a_b.files import load as load\nfrom a_b.files import save as save\n"


def found(parse: Parse, glossary: str, stub: str = STUB) -> str:
    package = Package(name="a-b", version="0.1.0", folder=Path("packages/a-b"), siblings=())
    sources = parse({"a_b/__init__.py": "", "a_b/files/__init__.py": "", "a_b/errors.py": ""})
    face = Source(path="a_b/__init__.pyi", module="a_b", text=stub, tree=ast.parse(stub))
    return as_text(check_words([package], sources, [face], glossary=glossary))


def test_a_glossary_of_every_name_and_room_has_no_problem(parse: Parse) -> None:
    assert found(parse, GLOSSARY) == ""


def test_a_public_name_without_a_row_is_found(parse: Parse) -> None:
    report = found(parse, GLOSSARY, STUB + "from a_b.errors import E as E\n")
    assert "no row for the public name `E` of packages/a-b/" in report


def test_a_name_in_the_section_of_another_package_does_not_count(parse: Parse) -> None:
    assert "no row for the public name `save`" in found(parse, GLOSSARY.replace("a-b", "c-d"))


def test_a_word_of_the_whole_repository_counts_in_every_package(parse: Parse) -> None:
    row = "| `save`, `load` | write and read a checkpoint |\n"
    text = GLOSSARY.replace(row, "").replace("| axis |", f"{row}| axis |")
    assert found(parse, text) == ""


def test_a_room_without_a_row_is_found(parse: Parse) -> None:
    text = GLOSSARY.replace("`files/`", "`file`")
    assert "no row for the room `files` of packages/a-b/" in found(parse, text)


def test_a_row_without_a_sentence_is_found(parse: Parse) -> None:
    text = GLOSSARY.replace("the room of file formats", "formats")
    assert "glossary.md:15: `files` is not explained" in found(parse, text)


def test_a_word_with_two_meanings_is_found(parse: Parse) -> None:
    text = GLOSSARY + "| axis | what a wheel turns on |\n"
    assert "`axis` (a-b) stands in line 8" in found(parse, text)
    assert "stands in line 14 (a-b) too" in found(parse, GLOSSARY + "| load | writes and reads |\n")


@pytest.mark.parametrize(
    "text",
    [
        "micro_batch = 1",
        "def f(num_micro_batches: int) -> None: ...",
        "class MicroBatch: ...",
        "config.aux_loss_coeff",
        "f(coeff=1)",
        "from p import AUX_COEFF_OF",
    ],
)
def test_a_name_in_a_spelling_that_was_given_up_is_found(parse: Parse, text: str) -> None:
    assert "p/m.py:1: " in as_text(check_spellings(parse({"p/m.py": text + "\n"})))


def test_the_spellings_of_the_repository_and_old_strings_are_free(parse: Parse) -> None:
    text = "microbatch, aux_loss_coef = old['moe_aux_loss_coeff'], coefficient  # micro_batch\n"
    assert not check_spellings(parse({"p/m.py": text}))
