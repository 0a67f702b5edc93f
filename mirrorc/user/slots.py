"""The slots of classes, in which their objects keep attributes."""

from __future__ import annotations

import types


def slots_of(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    """The slots that objects of a class have for attributes, those of its bases included.

    Each knows the name that the attribute is stored under, and reads, writes and deletes it past all methods of the class.
    """
    with_slots = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    return tuple(own for names in with_slots for own in names.values() if type(own) is types.MemberDescriptorType)
