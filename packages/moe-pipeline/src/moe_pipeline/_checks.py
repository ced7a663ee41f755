"""Checks of arguments, one for each kind of mistake; each names the argument and what it got."""

from math import inf

from moe_pipeline.errors import MoETypeError, MoEValueError


def check_type(name: str, value: object, *kinds: type, hint: str = "") -> None:
    """Refuse a value that is of none of these kinds."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise MoETypeError(f"{name} must be a {wanted}{hint}, got a {type(value).__name__}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no int, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise MoETypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise MoEValueError(f"{name} must be at least {least}, got {value}")


def check_finite(name: str, value: object) -> None:
    """Refuse what is no number, or is negative or infinite."""
    check_type(name, value, int, float)
    if isinstance(value, int | float) and not 0.0 <= value < inf:
        raise MoEValueError(f"{name} must be finite and not negative, got {value}")


def check_limit(name: str, value: object) -> None:
    """Refuse what is no time to wait: None, or seconds above 0."""
    if value is None:
        return
    check_finite(name, value)
    if value == 0:
        raise MoEValueError(f"{name}=0 must be above 0, or None")
