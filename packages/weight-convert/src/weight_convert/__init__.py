"""Streaming, bit-exact conversion of pretrained weights."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "Catalog": "catalog",
    "ConversionPlan": "plan",
    "CorruptFileError": "errors",
    "Difference": "verification",
    "Extent": "plan",
    "FamilySpec": "families",
    "FusedExperts": "families",
    "IncompleteExpertsError": "errors",
    "Report": "conversion",
    "StoredView": "families",
    "Summary": "inspection",
    "TargetExistsError": "errors",
    "TargetFile": "plan",
    "UnknownFamilyError": "errors",
    "VerifyReport": "verification",
    "WeightConvertError": "errors",
    "convert": "conversion",
    "detect_spec": "catalog",
    "get_spec": "families",
    "inspect": "inspection",
    "plan_conversion": "plan",
    "read_catalog": "catalog",
    "read_header": "header",
    "verify": "verification",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
