"""Names of the classes of a classification, without torch: from its data to its users.

``ds-engine preprocess --label`` writes the names into ``PREFIX.report.json``, in the order of their
numbers, which are all that the data holds. Training keeps them in the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_engine.config.schema import RunConfig, SourceConfig
from ds_engine.training.run_folder import write_json

FILE = "classes.json"


@dataclass(frozen=True)
class Classes:
    """What the labels of a data set mean.

    Attributes:
        names: of classes 0, 1, ...
        pairs: whether an example is a pair of texts.
    """

    names: tuple[str, ...]
    pairs: bool


def read_classes(prefix: str) -> Classes | None:
    """The classes of an indexed data set; None where no report of ours tells."""
    report = _read(Path(f"{prefix}.report.json"))
    return _classes(report.get("labels"), pairs=len(report.get("fields") or ()) == 3)


def run_classes(home: Path, run: RunConfig) -> Classes | None:
    """The classes that a run has learned; None where nothing tells.

    Args:
        home: the run's folder, where ``keep_classes`` wrote them.
        run: the run, whose training data tells, where it is still there, what its folder does not.
    """
    found = _kept(home) or next((classes for _, classes in _sources(run, ("train",))), None)
    # Data that was made anew for another task says nothing about this run.
    return found if found and len(found.names) == run.model.get("num_labels") else None


def keep_classes(home: Path, run: RunConfig) -> None:
    """Write the classes of a run's training data into its folder, if the data tells them.

    Args:
        home: the run's folder.
        run: a run without ``check_classes`` problems.
    """
    found = next((classes for _, classes in _sources(run, ("train",))), None)
    if found is not None:
        write_json(home / FILE, asdict(found))


def check_classes(run: RunConfig) -> list[str]:
    """Why the labels of a run's data do not mean the same everywhere; empty: they do.

    Args:
        run: its files exist, and its objective's type is not "auto".
    """
    if run.data.objective.type != "classification":
        return []
    found = list(_sources(run, ("train", "validation")))
    if not found:
        return []
    problems = []
    (first, classes), *others = found
    for key, other in others:
        problems += _differences(key, other, first, classes)
    count = run.model.get("num_labels")
    if count != len(classes.names):
        problems.append(
            f"model.num_labels = {count}, but {first} has {len(classes.names)} classes "
            f"({_listed(classes.names)}); set it to {len(classes.names)}, or name all classes with "
            "ds-engine preprocess --label-names"
        )
    home = Path(run.checkpoint.directory)
    kept = _kept(home) if any((home / "checkpoints").glob("step_*")) else None
    if kept is not None and kept.names != classes.names:
        problems.append(
            f"{first} has the classes {_listed(classes.names)}, but the run in {home} goes on with "
            f"what it has learned about {_listed(kept.names)}; restore the data, or start anew in "
            "another checkpoint.directory"
        )
    return problems


def check_data(prefix: str, learned: Classes) -> list[str]:
    """Why a run cannot be measured on a data set: its labels mean something else."""
    found = read_classes(prefix)
    return [] if found is None else _differences(prefix, found, "the run", learned)


def _differences(key: str, found: Classes, other: str, expected: Classes) -> list[str]:
    problems = []
    if found.names != expected.names:
        problems.append(
            f"{key} has the classes {_listed(found.names)}, but {other} has "
            f"{_listed(expected.names)}, and labels are stored as numbers in this order; write "
            "both with the same ds-engine preprocess --label-names"
        )
    if found.pairs != expected.pairs:
        kinds = {True: "pairs of texts", False: "single texts"}
        problems.append(
            f"{key} holds {kinds[found.pairs]}, but {other} has {kinds[expected.pairs]}; write "
            "both with the same ds-engine preprocess --fields"
        )
    return problems


def _sources(run: RunConfig, sections: tuple[str, ...]) -> Iterator[tuple[str, Classes]]:
    """Sources whose reports tell their classes, each with its key for messages."""
    for section in sections:
        sources: tuple[SourceConfig, ...] = getattr(run.data, section)
        for number, source in enumerate(sources):
            classes = read_classes(source.path)
            if classes is not None:
                yield f"data.{section}.{number}.path = {source.path}", classes


def _kept(home: Path) -> Classes | None:
    kept = _read(home / FILE)
    return _classes(kept.get("names"), pairs=kept.get("pairs") is True)


def _classes(names: object, *, pairs: bool) -> Classes | None:
    if not isinstance(names, list) or not names:
        return None
    return Classes(tuple(map(str, names)), pairs)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none: names are a help, and nothing depends on them."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _listed(names: tuple[str, ...]) -> str:
    """The names, but not hundreds of them."""
    rest = len(names) - 10
    return ", ".join(names[:10]) + (f" and {rest} more" if rest > 0 else "")
