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
NAMES = '[lib]\nreached = ["save", "room.load", "room.KINDS"]\nunreached = ["room.other"]\n'


def found(parse: Parse, **trainer: str) -> str:
    files = {f"moe_train/{name}.py": text for name, text in trainer.items()}
    return as_text(check_unreached(parse(LIBRARY | files), [], names=NAMES))


USES = (
    "from lib import save\nfrom lib.room import load\ndef run(): save(); load()\n",
    "import lib\nimport lib.room\ndef run():\n    lib.save()\n    return lib.room.load\n",
    "import lib.room as room\nclass Run:\n    def go(self): room.save(); room.load()\n",
    "def run():\n    from lib.room import save, load\n    save(load)\n",
    "from lib import room\nTABLE = {'a': room.save, 'b': room.load}\n",
)


@pytest.mark.parametrize("text", USES)
def test_a_name_is_reached_by_every_form_of_use_and_through_others(parse: Parse, text: str) -> None:
    assert found(parse, job=text) == ""


def test_a_name_that_only_its_own_library_uses_is_found(parse: Parse) -> None:
    report = found(parse, job="from lib import save\ndef run(): save()\n")
    assert "`lib.room.load` of packages/lib/ was reached by moe-train and is not" in report
    assert "save" not in report and "KINDS" not in report
    assert "`lib.save`" in found(parse, job="from lib import save\n"), "imported and not used"


def test_names_that_are_gone_are_not_looked_at(parse: Parse) -> None:
    names = '[lib]\nreached = ["gone", "room.gone", "nowhere.gone"]\nunreached = []\n'
    assert check_unreached(parse(LIBRARY), [], names=names) == []
