"""The classes of the table of `mirrorc.compile`'s options, with their checks."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from mirrorc.ir.devices import Device
from mirrorc.ir.workers import ALONE, Workers
from mirrorc.messages.problem import message, problem
from mirrorc.messages.wording import guess
from mirrorc.pipeline.pipeline_edits import Placed
from mirrorc.pipeline.protocol import Pass

FORMER: Mapping[str, str] = {
    "bucket_cap_mb": "give communication=mirrorc.Communication(buckets={value})",
    "first_bucket_mb": "give communication=mirrorc.Communication(buckets=mirrorc.packing.ByBytes(cap_mb, first_mb={value}))",
    "packing": "give communication=mirrorc.Communication(buckets=...), with mirrorc.packing.EqualPacks(n) for a number n",
    "gradient_order": "give communication=mirrorc.Communication(order={value})",
    "all_reduce": "give communication=mirrorc.Communication(algorithm={value})",
    "communication_options": (
        "give communication=mirrorc.Communication(buckets=bytes_per_pack / 2**20, timeout=..., algorithm='ring')"
    ),
    "timeout_seconds": "give communication=mirrorc.Communication(timeout={value})",
    "activation_memory": "give memory=mirrorc.Memory(activations=...), such as '50%', '2GiB' or a number of bytes",
    "add_passes": "give compiler=mirrorc.Compiler(add=...)",
    "disable_passes": "give compiler=mirrorc.Compiler(disable={value})",
    "print_after_all": "give debug=mirrorc.Debug(print_after='all')",
    "record": "the times of the last steps are always recorded; leave it out",
    "example_inputs": "call step.prepare(*batch) after mirrorc.compile()",
    "workers": "give distributed=False, to train in this process alone, or leave it out",
    "world": "call mirrorc.plan(model, batch, world={value}, rank=...), which gives the program of one of its workers",
    "rank": "call mirrorc.plan(model, batch, world=..., rank={value}), which gives the program of one worker",
    "overlap_next_step": "it gained nothing on any machine where it was measured; leave it out",
}
"""Former options, and their replacements; ``{value}`` stands for the value."""

_SCALARS = (str, bool, int, float)
_STRICT_KINDS = (bool, str, bytes)  # not numbers or sequences, although Python treats them so


@dataclass(frozen=True)
class Request:
    """The arguments of a call of `mirrorc.compile`, by name; ``pipeline`` is empty until its passes are known."""

    asked: Mapping[str, Any]
    workers: Workers = ALONE
    devices: tuple[Device, ...] = ()
    pipeline: Sequence[Pass] = ()

    def __getitem__(self, option: str) -> Any:
        return self.asked[option]

    @property
    def device_type(self) -> str:
        return self.devices[0].torch_device.type

    @property
    def device_names(self) -> str:
        return ", ".join(device.name for device in self.devices)


@dataclass(frozen=True)
class Exclusion:
    """A reason to refuse an option."""

    beside: str  # another option, or a phrase such as "over several workers"
    why: (
        str | Callable[[Request], str]
    )  # if the other option is given; or a function from the request to a reason or ""
    remedy: str = ""  # or else to leave out one of the two
    needs_pipeline: bool = False  # the reason depends on the request's passes


WITHOUT_OPTIMIZER = Exclusion(
    "without optimizer=",
    lambda request: "it is for the step's own updates, and there are none" if request["optimizer"] is None else "",
    "leave the option out, and change the gradients of step.gradients(x, y) by yourself",
)


@dataclass(frozen=True)
class NeededPasses:
    """The passes of the default pipeline that implement an option."""

    names: Sequence[str] | Callable[[Any], Sequence[str]]  # or a function from the option's value to them
    instead: str | Callable[[Any], str]  # the remedy if ``passes=`` is given; ``{value}`` stands for the option's value
    may_be_in_passes: bool = False  # the option may be given with ``passes=`` that include the named passes

    def names_for(self, value: Any) -> Sequence[str]:
        return self.names(value) if callable(self.names) else self.names

    def remedy_for(self, value: Any) -> str:
        return self.instead(value) if callable(self.instead) else self.instead.format(value=repr(value))


@dataclass(frozen=True)
class Option:
    """An option of `mirrorc.compile`.

    Attributes:
        name: the keyword.
        allowed: the allowed values, for messages: "give ...".
        default: the value of an option that is not given.
        kinds: the allowed types; bool, str and bytes match only themselves. With None, types are checked elsewhere.
        texts: allowed strings.
        accepts: tests a value of an allowed type, for example for being positive.
        passes: passes that implement it, if any.
        places: for an option declared outside of the package, a function from its value to passes to insert
            (`mirrorc.before`).
        group: the keyword of the `OptionGroup` with this option; empty for an option that is a keyword.
    """

    name: str
    allowed: str = ""
    default: Any = None
    kinds: tuple[Any, ...] | None = None
    texts: tuple[str, ...] = ()
    accepts: Callable[[Any], bool] = field(default=lambda value: True)
    passes: NeededPasses | None = None
    excludes: tuple[Exclusion, ...] = ()
    places: Callable[[Any], Sequence[Placed]] | None = None
    group: str = ""

    def is_asked(self, value: Any) -> bool:
        """False for the default, and for disabled objects such as a disabled GradScaler."""
        if value is self.default or (isinstance(value, _SCALARS) and value == self.default):
            return False
        return not (hasattr(value, "is_enabled") and not value.is_enabled())

    def check_kind(self, value: Any) -> None:
        """Raises TypeError for a wrong type, and ValueError for a text or number that is not allowed."""
        if self.texts and isinstance(value, str):
            is_taken = value in self.texts
        elif self.kinds is not None and not any(_is_of(value, kind) for kind in self.kinds):
            raise TypeError(f"MC1001: {self.name} is {shown(value)}: {self.allowed}")
        else:
            is_taken = value is None or self.accepts(value)
        if not is_taken:
            raise ValueError(f"MC1002: {self.name} is {shown(value)}: {self.allowed}")

    def text(self, value: Any) -> str:
        """The option and its value for messages: ``link='nccl'``; without a large value: ``buckets=``."""
        text = repr(value)
        return f"{self.name}={text}" if len(text) <= 60 and " object at 0x" not in text else f"{self.name}="


class OptionGroup:
    """The base of frozen dataclasses with options of one topic, fields by `option`; ``keyword`` of `mirrorc.compile`."""

    keyword: ClassVar[str]

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        known = [each.name for each in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name, value in fields.items():
            if name in FORMER:
                fix = FORMER[name].format(value=_spelled(value))
                raise problem(TypeError, f"MC1006: mirrorc.{cls.__name__} has no {name!r}", fix=fix)
            if name not in known:
                raise TypeError(
                    f"MC1005: mirrorc.{cls.__name__} got an unexpected keyword argument {name!r}; "
                    + guess(name, known, f"its fields are {', '.join(known)}")
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for record in records_of(type(self)):
            record.check_kind(getattr(self, record.name))


def option(default: Any, allowed: str = "", **record: Any) -> Any:
    """A field of an `OptionGroup`. The arguments are those of its `Option`."""
    return field(default=default, metadata={"allowed": allowed, **record})


def records_of(group: type[OptionGroup]) -> tuple[Option, ...]:
    return tuple(
        Option(name=each.name, default=each.default, group=group.keyword, **each.metadata)
        for each in dataclasses.fields(group)  # type: ignore[arg-type]
    )


class Options:
    """The table of options: keywords of `mirrorc.compile`, and fields of groups."""

    def __init__(self, records: Sequence[Option], groups: Sequence[type[OptionGroup]]) -> None:
        self.groups = {group.keyword: group for group in groups}
        grouped = [record for group in groups for record in records_of(group)]
        self._records = {record.name: record for record in (*records, *grouped)}
        assert len(self._records) == len(records) + len(grouped), "an option has a name of its own"
        self._builtin = frozenset(self._records)

    def __getitem__(self, name: str) -> Option:
        return self._records[name]

    def __iter__(self) -> Iterator[Option]:
        return iter(self._records.values())

    @property
    def defaults(self) -> dict[str, Any]:
        return {option.name: option.default for option in self}

    @property
    def keywords(self) -> dict[str, Any]:
        """The parameters of `mirrorc.compile` that are options or groups, with their defaults."""
        alone = {name: self[name].default for name in self._records if name in self._builtin and not self[name].group}
        return {**alone, **dict.fromkeys(self.groups)}

    def declare(self, option: Option) -> None:
        """Adds an option from outside of the package, under a new name, as a keyword of `mirrorc.compile`."""
        if option.name in self._records or option.name in ("model", "devices", "batch", *self.groups, *FORMER):
            raise ValueError(
                f"MC4005: there is an option {option.name!r} already, or was one: give this one another name"
            )
        self._records[option.name] = option

    def withdraw(self, name: str) -> None:
        if name in self._builtin:
            raise ValueError(f"MC4005: {name!r} cannot be withdrawn: it is an option of mirrorc's own")
        del self._records[name]

    def by_name(self, asked: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
        """All options by name, from the keywords of a call; ``declared`` are no parameters of `mirrorc.compile`. If a
        group is None, its options have their defaults.
        """
        for name in declared.keys() - (self._records.keys() - self._builtin):
            raise TypeError(self._why_no_option(name, declared[name]))
        flat = {name: value for name, value in asked.items() if name not in self.groups}
        for keyword, kind in self.groups.items():
            group = kind() if asked[keyword] is None else asked[keyword]
            if not isinstance(group, kind):
                raise TypeError(f"MC1001: {keyword} is {shown(group)}: give a mirrorc.{kind.__name__}, or None")
            flat |= {record.name: getattr(group, record.name) for record in records_of(kind)}
        outside = {option.name: option.default for option in self if option.name not in self._builtin}
        return {**flat, **outside, **declared}

    def _why_no_option(self, name: str, value: Any) -> str:
        record = self._records.get(name)
        if record is not None:
            return message(f"MC1005: {name!r} is a field of a group", fix=self._in_group(record, value))
        if name in FORMER:
            fix = FORMER[name].format(value=_spelled(value))
            return message(f"MC1006: mirrorc.compile() has no option {name!r} any more", fix=fix)
        close = difflib.get_close_matches(name, ("model", "devices", *self.groups, *self._records), n=1)
        near = self._records.get(close[0]) if close else None
        meant = self._in_group(near, value) if near is not None and near.group else repr(*close) if close else ""
        what = f"MC1005: mirrorc.compile() got an unexpected keyword argument {name!r}{meant and f'; did you mean {meant}'}"
        return message(what, fix="" if meant else f"leave {name}= out; help(mirrorc.compile) has all options")

    def _in_group(self, record: Option, value: Any) -> str:
        return f"{record.group}=mirrorc.{self.groups[record.group].__name__}({record.name}={_spelled(value)})"

    def check_kinds(self, asked: Mapping[str, Any]) -> None:
        for option in self:
            option.check_kind(asked[option.name])

    def check_passes(self, request: Request) -> None:
        """Refuses options whose passes are missing because of ``passes=`` or ``disable=``."""
        passes, disabled = request["passes"], request["disable"]
        for option in self:
            value = request[option.name]
            if option.passes is None or not option.is_asked(value):
                continue
            names = option.passes.names_for(value)
            for name in names:
                if name in disabled:
                    raise problem(
                        ValueError,
                        f"MC1003: {option.text(value)} needs the pass {name!r}, which disable= switches off",
                        fix=(f"take {name!r} out of disable=", f"leave {option.name}= out"),
                    )
            is_there = passes is not None and {*names} <= {getattr(entry, "name", "") for entry in passes}
            if passes is not None and not (option.passes.may_be_in_passes and is_there):
                why = "the pipeline given with passes= decides it"
                fix = (
                    option.passes.remedy_for(value),
                    "compiler=mirrorc.Compiler(add=..., disable=...) in place of passes=",
                )
                raise problem(ValueError, f"MC1004: {option.text(value)} and passes= cannot be combined", why, fix)

    def check_exclusions(self, request: Request) -> None:
        """Refuses options that another option, the devices, or several workers exclude."""
        has_pipeline = bool(request.pipeline)
        for option in self:
            value = request[option.name]
            if not option.is_asked(value):
                continue
            for exclusion in option.excludes:
                if exclusion.needs_pipeline == has_pipeline and (why := self._reason(exclusion, request)):
                    beside = self._beside(exclusion.beside, request)
                    either = [f"leave {name}= out" for name in (option.name, exclusion.beside) if name in self._records]
                    fix = exclusion.remedy or either
                    raise problem(ValueError, f"MC1003: {option.text(value)} cannot be used {beside}", why, fix)

    def _reason(self, exclusion: Exclusion, request: Request) -> str:
        if callable(exclusion.why):
            return exclusion.why(request)
        return exclusion.why if self[exclusion.beside].is_asked(request[exclusion.beside]) else ""

    def _beside(self, beside: str, request: Request) -> str:
        return (
            f"with {self[beside].text(request[beside])}" if beside in self._records else beside.format(request=request)
        )

    def placed(self, request: Request) -> list[Placed]:
        """Passes that declared options insert into the pipeline."""
        asked = ((option, request[option.name]) for option in self if option.places is not None)
        return [placed for option, value in asked if option.is_asked(value) for placed in option.places(value)]  # type: ignore[misc]


def _spelled(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and " at 0x" not in text and not text.startswith("<") else "..."


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def _is_of(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind in _STRICT_KINDS or not isinstance(value, _STRICT_KINDS))
