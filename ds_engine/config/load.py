"""From a run file to a ``RunConfig``: includes, merging, overrides and back to JSON.

A section is an object, the path of a JSON file, or a list of paths followed by objects. Files are
equals: two that set one leaf to two values are an error. Objects come last and override.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_engine.config.deepspeed import check_deepspeed
from ds_engine.config.reader import (
    did_you_mean,
    field_types,
    parse_json,
    raise_problems,
    read_dataclass,
    read_json,
    show,
)
from ds_engine.config.schema import RunConfig
from ds_engine.errors import ConfigError

_SCALARS = ("seed",)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file, its includes and ``--set`` overrides.

    Args:
        path: The run file. Paths of included files are relative to the file that names them.
        overrides: Texts such as "training.steps=10", "model.attention.num_heads=8" or
            "data.train.0.path=data/a": the value is JSON, else a string. A whole section may be
            set to a path or a list, then relative to the working directory.

    Returns:
        The run, with DeepSpeed's section checked for unknown keys but the model's not yet (its
        family knows them: ``launch.check.check_run``).

    Raises:
        ConfigError: For the first unreadable file or conflict, or listing all problems of values.
    """
    return read_run(merged_run(path, overrides))


def read_run(raw: Any) -> RunConfig:
    """Reads a merged run object; see ``load_run``."""
    run = read_dataclass(RunConfig, raw, "")
    raise_problems(check_deepspeed(run.deepspeed))
    return run


def merged_run(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The run file as one plain object, includes merged and overrides applied, not yet read."""
    path = Path(path)
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold one JSON object, not {show(raw)}")
    run = {
        key: value
        if key in _SCALARS or key not in field_types(RunConfig)
        else _resolve(value, path, key, (path.resolve(),))
        for key, value in raw.items()
    }
    for text in overrides:
        _override(run, text)
    return run


def run_to_dict(run: RunConfig) -> dict[str, Any]:
    """The resolved run as plain JSON values; ``load_run`` reads it back to an equal run."""
    plain = _plain(dataclasses.asdict(run))
    return dict(plain)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _resolve(value: Any, source: Path, where: str, chain: tuple[Path, ...]) -> Any:
    """Merges one section. ``source`` holds it; ``chain`` holds the files being read."""
    if isinstance(value, str):
        return _include(value, source, where, chain)
    if not isinstance(value, list):
        return copy.deepcopy(value)
    from_files: dict[str, Any] = {}
    owners: dict[tuple[str, ...], tuple[Any, str]] = {}
    conflicts: dict[tuple[str, ...], str] = {}
    inline: list[dict[str, Any]] = []
    for part in value:
        if isinstance(part, dict):
            inline.append(part)
        elif isinstance(part, str) and not inline:
            _add_file(from_files, _include(part, source, where, chain), part, owners, conflicts)
        elif isinstance(part, str):
            raise ConfigError(
                f'{source}: {where} lists the file "{part}" after an object; objects come last, '
                "because they override the files"
            )
        else:
            raise ConfigError(
                f"{source}: {where} lists {show(part)}; list file names, then objects"
            )
    for part in inline:
        _merge(from_files, part)
        overridden = set(_leaves(part))
        conflicts = {
            leaf: text
            for leaf, text in conflicts.items()
            if not any(leaf[: len(key)] == key or key[: len(leaf)] == leaf for key in overridden)
        }
    raise_problems(f"{source}: {where}.{text}" for text in conflicts.values())
    return from_files


def _include(name: str, source: Path, where: str, chain: tuple[Path, ...]) -> dict[str, Any]:
    path = source.parent / name
    if path.resolve() in chain:
        raise ConfigError(f'{source}: {where} includes "{name}", which includes itself')
    try:
        content = read_json(path)
    except ConfigError as error:
        raise ConfigError(f'{source}: {where} includes "{name}": {error}') from None
    merged = _resolve(content, path, where, (*chain, path.resolve()))
    if not isinstance(merged, dict):
        raise ConfigError(f"{path}: holds {show(merged)}; a {where} section must be an object")
    return merged


def _leaves(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Paths of all values that are not non-empty objects."""
    leaves: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves.update(_leaves(value, (*prefix, key)))
        else:
            leaves[*prefix, key] = value
    return leaves


def _add_file(
    target: dict[str, Any],
    content: dict[str, Any],
    name: str,
    owners: dict[tuple[str, ...], tuple[Any, str]],
    conflicts: dict[tuple[str, ...], str],
) -> None:
    for leaf, value in _leaves(content).items():
        # A leaf also conflicts with an object of another file in its place, and the reverse.
        for known, (other, owner) in owners.items():
            shorter = min(len(leaf), len(known))
            if leaf[:shorter] != known[:shorter]:
                continue
            # An empty object in one file and a filled one in the other agree: {} sets nothing.
            if (value == {} and len(known) > shorter) or (other == {} and len(leaf) > shorter):
                continue
            if leaf != known or not _same(value, other):
                conflicts[leaf] = (
                    f'{".".join(leaf)} is {show(value)} in "{name}" but '
                    f'{".".join(known)} is {show(other)} in "{owner}"; remove one of them, or set '
                    "it in the object at the end of the list"
                )
        owners.setdefault(leaf, (value, name))
    _merge(target, content)


def _same(one: Any, other: Any) -> bool:
    # 1, 1.0 and true are equal in Python but not the same setting (true) or the same (1.0).
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _merge(target: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def _override(run: dict[str, Any], text: str) -> None:
    name, equals, word = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write it as key.key=value, such as training.steps=10")
    sections = field_types(RunConfig)
    if keys[0] not in sections:
        raise ConfigError(
            f"--set {text}: {keys[0]} is not a known key{did_you_mean(keys[0], sections)}"
        )
    value = _parse_word(word, f"--set {name}")
    if len(keys) == 1 and keys[0] not in _SCALARS:
        value = _resolve(value, Path(f"--set {name}"), keys[0], ())
    target: Any = run
    for depth, key in enumerate(keys[:-1], 1):
        if isinstance(target, dict):
            if target.get(key) is None:
                target[key] = {}
            target = target[key]
        else:
            target = target[_index(target, key, keys[: depth - 1], text)]
    if isinstance(target, dict):
        target[keys[-1]] = value
    else:
        target[_index(target, keys[-1], keys[:-1], text)] = value


def _parse_word(word: str, source: str) -> Any:
    try:
        return parse_json(word, source)
    except ConfigError:
        # Not JSON, so a plain string; but a broken object or list is a slip, not a string.
        if word.lstrip()[:1] in ("{", "["):
            raise
        return word


def _index(target: Any, key: str, place: list[str], text: str) -> int:
    where = ".".join(place)
    if not isinstance(target, list):
        raise ConfigError(f"--set {text}: {where} is {show(target)} and has no key {key}")
    if not key.isdecimal() or int(key) >= len(target):
        raise ConfigError(
            f"--set {text}: {where} is a list of {len(target)}; use an index below {len(target)}"
        )
    return int(key)
