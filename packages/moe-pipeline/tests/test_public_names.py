import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_pipeline


def test_stub_and_package_list_the_same_names():
    stub = Path(moe_pipeline.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imported = dict(
        reversed(pair)
        for pair in re.findall(r"from moe_pipeline\.(\w+) import (?:\(\s+)?(\w+) as \2", stub)
    )
    listed = re.findall(r'^    "(\w+)",$', stub, flags=re.MULTILINE)
    assert imported == moe_pipeline._MODULE_OF
    assert listed == moe_pipeline.__all__


@pytest.mark.parametrize("name", moe_pipeline.__all__)
def test_every_public_name_resolves(name):
    assert getattr(moe_pipeline, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = moe_pipeline.Nothing


def test_importing_the_package_does_not_import_torch():
    code = "import sys, moe_pipeline; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
