"""Classes of labelled records: their names, and their numbers from 0."""

from collections.abc import Iterable, Mapping, Sequence

from ds_engine.errors import DataError
from preprocessing.document import Label


def label_name(value: Label) -> str:
    """Return the name of a class: a string itself, else as JSON writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def number_labels(names: Sequence[str]) -> dict[str, int]:
    """Return the number of each named class.

    Raises:
        DataError: a name is empty or given twice, or there is only one.
    """
    if len(set(names)) != len(names) or "" in names:
        raise DataError(f"--label-names {','.join(names)}: names must differ and not be empty")
    if len(names) < 2:
        raise DataError(f"--label-names {','.join(names)}: a classification needs two classes")
    return {name: number for number, name in enumerate(names)}


def note_label(found: dict[tuple[str, Label], str], value: Label, where: str) -> None:
    """Remember where a value, together with its type (True equals 1 in Python), was seen first."""
    found.setdefault((type(value).__name__, value), where)


def collect_labels(found: Iterable[Mapping[tuple[str, Label], str]]) -> list[str]:
    """Return the names of all classes found, sorted: integers by value, strings by their letters.

    None at all means that no record is good; tokenizing them will say what is wrong.

    Args:
        found: what ``note_label`` found in consecutive parts of the input.

    Raises:
        DataError: values of several kinds, or one class only.
    """
    first: dict[tuple[str, Label], str] = {}
    for part in found:
        first = {**part, **first}
    kinds = {kind: (value, where) for (kind, value), where in reversed(first.items())}
    if len(kinds) > 1:
        seen = "; ".join(f"{value!r} at {where}" for value, where in kinds.values())
        raise DataError(
            f"labels are of several kinds: {seen}; write them alike, or name them all with "
            "--label-names"
        )
    values = [value for _, value in first]
    if len(values) == 1:
        raise DataError(
            f"a classification needs two classes, but all labels are {values[0]!r}; name all with "
            "--label-names if other files hold the rest"
        )
    return [label_name(value) for value in sorted(values)]  # type: ignore[type-var]


def label_number(value: Label, numbers: Mapping[str, int], where: str) -> int:
    """Return the number of a class.

    Raises:
        DataError: it is none of the named ones.
    """
    name = label_name(value)
    if name not in numbers:
        raise DataError(
            f"{where}: label {value!r} is not one of {', '.join(numbers)}; mend the record, or add "
            "it to --label-names"
        )
    return numbers[name]
