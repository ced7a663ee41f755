from collections.abc import Callable

import pytest

from gates.source import Source, as_text
from gates.unreached import check_unreached

Parse = Callable[[dict[str, str]], list[Source]]

LIBRARY = {
    "lib/__init__.py": "from lib.room import save as save\n",
    "lib/room/__init__.py": "from lib.room.part import save as save\n"
    "from lib.room.part import load as load\nfrom lib.room.part import KINDS as KINDS\n",
    "lib/room/part.py": "def save(): return _helper()\ndef _helper(): return KINDS\n"
    "def load(): pass\nKINDS = (1,)\n",
    "lib/extra.py": "from lib.room import load\ndef unused(): load()\n",
}


def found(parse: Parse, names: str = "", **trainer: str) -> str:
    files = {f"moe_train/{name}.py": text for name, text in trainer.items()}
    return as_text(check_unreached(parse(LIBRARY | files), [], names=names))


USES = (
    "from lib import save\nfrom lib.room import load\ndef run(): save(); load()\n",
    "import lib\nimport lib.room\ndef run():\n    lib.save()\n    return lib.room.load\n",
    "import lib.room as room\nclass Run:\n    def go(self): room.save(); room.load()\n",
    "def run():\n    from lib.room import save, load\n    save(load)\n",
    "from lib import room\nTABLE = {'a': room.save, 'b': room.load}\n",
    "def run(): return [import_module('lib').save, import_module('lib.room').load]\n",
)


@pytest.mark.parametrize("text", USES)
def test_a_name_is_reached_by_every_form_of_use_and_through_others(parse: Parse, text: str) -> None:
    assert found(parse, job=text) == ""


def test_a_name_that_only_its_own_library_uses_is_found(parse: Parse) -> None:
    report = found(parse, job="from lib import save\ndef run(): save()\n")
    assert "`lib.room.load` is reached neither by moe-train nor by a command" in report
    assert "save" not in report and "KINDS" not in report
    assert "`lib.save`" in found(parse, job="from lib import save\n"), "imported and not used"


def test_a_module_that_is_run_by_its_name_reaches_what_it_uses(parse: Parse) -> None:
    job = "from lib import save\ndef run(): save('-m', 'lib.{}')\n"
    assert found(parse, job=job.format("extra")) == ""
    assert "`lib.room.load`" in found(parse, job=job.format("room.part.load"))


@pytest.mark.parametrize("module", ["lib/cli", "lib/__main__", "lib/commands/one", "other/cli"])
def test_the_command_of_the_own_package_is_a_user(parse: Parse, module: str) -> None:
    uses = "from lib import save\nfrom lib.room import load\ndef main(): save(); load()\n"
    files = LIBRARY | {f"{module}.py": uses, "moe_train/job.py": "def run(): pass\n"}
    report = as_text(check_unreached(parse(files), [], names=""))
    assert ("`lib.room.load`" in report) == (module == "other/cli")


def test_a_list_says_for_whom_names_are_and_holds_no_other_names(parse: Parse) -> None:
    one = "from lib import save\ndef run(): save()\n"
    assert found(parse, '"for notebooks" = ["lib.room.load"]', job=one) == ""
    report = found(parse, '"for notebooks" = ["lib.room.load", "lib.save", "lib.gone"]', job=one)
    assert "`lib.save` is listed as reached by nobody (for notebooks), but it is" in report
    assert "`lib.gone` is listed" in report and "room.load" not in report
    twice = '"for notebooks" = ["lib.room.load"]\n"for others" = ["lib.room.load"]'
    assert "a name is listed twice" in found(parse, twice, job=one)
    many = f'"for others" = {[f"lib.room.number_{n}" for n in range(16)]}'
    assert "16 names without a user; at most 15" in found(parse, many, job=USES[0])
