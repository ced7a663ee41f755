"""Every key that transformers' configuration classes write is known, for the nine families."""

import pytest

from moe_train.model.families import RULES
from moe_train.model.known_keys import unknown_keys

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("family", RULES)
def test_every_key_of_the_configuration_class_is_known(family: str) -> None:
    assert unknown_keys(transformers.AutoConfig.for_model(family).to_dict()) == []
