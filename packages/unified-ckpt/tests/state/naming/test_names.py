import pytest
from torch import nn

from unified_ckpt.state.naming.names import ModuleNames, Names, plain_key, plain_name


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.w", "w"),
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.w", "layers.0.w"),
        ("_fsdp_wrapped_module.a.module.w/moment1", "a.w/moment1"),
        ("w/module.codes", "w/module.codes"),
        ("module", "module"),
        ("modules.w", "modules.w"),
    ],
)
def test_a_name_is_plain_without_wrappers(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_equal_names_come_first_and_two_alike_are_neither() -> None:
    names = Names(["module.a", "b", "module.b", "_orig_mod.c", "module.c"])
    assert (names.find("a"), names.find("_orig_mod.a")) == ("module.a", "module.a")
    assert (names.find("b"), names.find("module.b")) == ("b", "module.b")
    assert names.find("_orig_mod.b") is None and names.find("c") is None
    assert names.find("d") is None


def test_a_modules_own_attribute_of_that_name_stays() -> None:
    model = nn.ModuleDict({"module": nn.DataParallel(nn.Linear(1, 1))})
    assert plain_key(model, "module.module.weight") == "module.weight"
    names = ModuleNames({"extra": [{"deep": model}]})
    assert names.of(model["module"].module.weight) == "0.deep.module.weight"
    assert names.of(nn.Parameter()) is None and names.in_order() == []
