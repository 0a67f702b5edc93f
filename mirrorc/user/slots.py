"""The slots of classes."""

from __future__ import annotations

import types


def slots_of(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    """Slots of a class and its bases. They access attributes without the class's methods."""
    with_slots = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    return tuple(
        member for names in with_slots for member in names.values() if type(member) is types.MemberDescriptorType
    )
