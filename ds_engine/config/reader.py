"""The strict reader: JSON text to frozen dataclasses, with no guess and no silent default.

Every part of a configuration goes through ``read_dataclass``, so that a misspelt key, a value of
another type or a number out of range is reported in one style, with the place where it stands.
"""

import copy
import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union

from ds_engine.errors import ConfigError

T = TypeVar("T")

_SHOWN_NAMES = 15


@dataclass(frozen=True)
class Range:
    """Limits of a number, attached to a field as ``Annotated[int, Range(minimum=1)]``.

    Attributes:
        minimum: Smallest allowed value, or None.
        maximum: Largest allowed value, or None.
        above: The value must be greater than this, or None.
        below: The value must be smaller than this, or None.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def rule(self) -> str:
        """The limits in words, such as "at least 0 and below 1"."""
        parts = (
            ("at least", self.minimum),
            ("above", self.above),
            ("at most", self.maximum),
            ("below", self.below),
        )
        return " and ".join(f"{word} {limit:g}" for word, limit in parts if limit is not None)

    def holds(self, value: float) -> bool:
        """Whether ``value`` keeps all limits."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[int, Range(minimum=1)]
Probability = Annotated[float, Range(minimum=0, below=1)]
NonNegative = Annotated[float, Range(minimum=0)]
AboveZero = Annotated[float, Range(above=0)]


def read_dataclass(cls: type[T], mapping: Any, where: str) -> T:
    """Builds ``cls`` from a JSON object, or raises one error that lists every problem found.

    Understands nested dataclasses, ``Annotated[..., Range]``, ``Literal``, ``X | None``,
    ``tuple[X, ...]``, ``dict[str, X]``, bool, int, float, str and ``Any``. A bool is not an int; an
    int is read as a float where a float is asked for; null is allowed for optional fields only.

    A dataclass may define ``check_fields(self, where: str) -> list[str]``: it is called
    once its fields are sound and returns the rules that they break together.

    Args:
        cls: A dataclass.
        mapping: The object as parsed from JSON.
        where: Dotted path of the object, for messages; "" for the whole file.

    Raises:
        ConfigError: With the path, the value, the rule and, for names, the nearest valid one.
    """
    problems: list[str] = []
    value = _read_object(cls, mapping, where, problems)
    raise_problems(problems)
    return typing.cast(T, value)


class ConfigProblems(ConfigError):
    """Several problems, or one, in a single error.

    Attributes:
        problems: The text of each.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        lines = [f"  {number}. {text}" for number, text in enumerate(self.problems, 1)]
        many = f"{len(lines)} problems in the configuration:\n" + "\n".join(lines)
        super().__init__(self.problems[0] if len(lines) == 1 else many)


def raise_problems(problems: Iterable[str]) -> None:
    """Raises one error that lists all problems, numbered if several; returns if there is none."""
    listed = list(problems)
    if listed:
        raise ConfigProblems(listed)


def problems_of(error: ConfigError) -> tuple[str, ...]:
    """The single problems of an error, to be listed with others."""
    return error.problems if isinstance(error, ConfigProblems) else (str(error),)


def did_you_mean(word: object, valid: Iterable[object]) -> str:
    """A text such as `; did you mean "steps"? Known: ...` with the nearest of the valid names.

    Of a long list of names only the most similar are shown.
    """
    names = [str(name) for name in valid]
    near = nearest(word, names, count=1)
    hint = f'; did you mean "{near[0]}"?' if near else "."
    shown = names
    if len(names) > _SHOWN_NAMES:
        shown = nearest(word, names, count=_SHOWN_NAMES, cutoff=0.0)
        shown.append(f"... ({len(names)} in all)")
    return f"{hint} Known: {', '.join(shown)}"


def nearest(
    word: object, names: Iterable[str], *, count: int = 1, cutoff: float = 0.5
) -> list[str]:
    """The ``count`` names most similar to ``word``, upper and lower case being the same."""
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(str(word).lower(), lower, n=count, cutoff=cutoff)
    return [lower[name] for name in close]


def join_path(where: str, key: object) -> str:
    """The dotted path of ``key`` inside the object at ``where``."""
    return f"{where}.{key}" if where else str(key)


def show(value: object) -> str:
    """A value as JSON, shortened for a message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_json(text: str, source: str) -> Any:
    """Parses strict JSON: no duplicate key, no NaN, no infinity, nothing after the value.

    Args:
        text: The JSON text.
        source: File name or description, for messages.

    Raises:
        ConfigError: With source, line and column for a syntax error.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                raise ConfigError(f'{source}: the key "{key}" stands twice in one object; keep one')
            result[key] = value
        return result

    def constant(word: str) -> NoReturn:
        raise ConfigError(f"{source}: {word} is not JSON; write a finite number or null")

    def number(word: str) -> float:
        value = float(word)
        return value if math.isfinite(value) else constant(word)

    try:
        return json.loads(
            text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number
        )
    except json.JSONDecodeError as error:
        place = f"{source}, line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{place}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply to be a configuration") from None


def read_json(path: Path) -> Any:
    """Reads one JSON file strictly; see ``parse_json``.

    Raises:
        ConfigError: If the file is missing, unreadable, not UTF-8 or not strict JSON.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            names = sorted(entry.name for entry in path.parent.glob("*.json"))
            near = nearest(path.name, names)
            hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ConfigError(f"{path}: {error.strerror or error}{hint}") from None
    return parse_json(text, str(path))


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The resolved annotation of each field of a dataclass, ``Annotated`` kept."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _read_object(cls: Any, mapping: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(mapping, Mapping):
        problems.append(f"{where or 'the file'} = {show(mapping)} must be a JSON object")
        return None
    before = len(problems)
    hints = field_types(cls)
    for key in mapping:
        if key not in hints:
            problems.append(f"{join_path(where, key)} is not a known key{did_you_mean(key, hints)}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        path = join_path(where, field.name)
        if field.name in mapping:
            values[field.name] = _read_value(hints[field.name], mapping[field.name], path, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{path} is missing; add it ({describe(hints[field.name])})")
    if len(problems) > before:
        return None
    result = cls(**values)
    if hasattr(result, "check_fields"):
        problems.extend(result.check_fields(where))
    return result


def _read_value(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return copy.deepcopy(value)
    if origin is Annotated:
        read = _read_value(arguments[0], value, where, problems)
        for limit in arguments[1:]:
            if read is not None and isinstance(limit, Range) and not limit.holds(read):
                problems.append(f"{where} = {show(value)} must be {limit.rule()}")
        return read
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _read_value(inner, value, where, problems)
    if dataclasses.is_dataclass(hint):
        return _read_object(hint, value, where, problems)
    if origin is Literal:
        # JSON true equals 1 in Python, so compare the types too.
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            problems.append(
                f"{where} = {show(value)} is not one of its values{did_you_mean(value, arguments)}"
            )
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        items = enumerate(value)
        return tuple(_read_value(arguments[0], v, f"{where}.{i}", problems) for i, v in items)
    if origin is dict and isinstance(value, Mapping):
        return {
            k: _read_value(arguments[1], v, join_path(where, k), problems) for k, v in value.items()
        }
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = origin or hint
    if plain in (bool, int, float, str) and type(value) is plain:
        if plain is float and not math.isfinite(value):
            problems.append(f"{where} = {value} must be a finite number")
        return value
    problems.append(f"{where} = {show(value)} must be {describe(hint)}")
    return None


def describe(hint: Any) -> str:
    """An annotation in words, such as "an integer, at least 1, or null"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [limit.rule() for limit in arguments[1:] if isinstance(limit, Range)]
        return ", ".join([describe(arguments[0]), *limits])
    if origin in (Union, types.UnionType):
        inner = [describe(argument) for argument in arguments if argument is not types.NoneType]
        return f"{inner[0]}, or null"
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is tuple:
        return "a list"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "an object"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names.get(hint, "any value")
