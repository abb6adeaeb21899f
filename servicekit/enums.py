"""Values of the protocol's enums by their short names: READY for INSTANCE_STATE_READY, and back."""

import re
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

V = TypeVar("V", bound=int)
_HUMP = re.compile(r"(?<!^)(?=[A-Z])")


def short_name(enum: "_EnumTypeWrapper[V]", number: V) -> str:
    """Return a value's name without the enum's.

    Raises:
        ValueError: The enum has no such value.
    """
    return enum.Name(number).removeprefix(_prefix(enum.DESCRIPTOR.name))


def number_of(enum: "_EnumTypeWrapper[V]", short: str) -> V:
    """Return the value of a short name.

    Raises:
        ValueError: The enum has no such value.
    """
    return enum.Value(_prefix(enum.DESCRIPTOR.name) + short)


@cache
def _prefix(name: str) -> str:
    return f"{_HUMP.sub('_', name).upper()}_"
