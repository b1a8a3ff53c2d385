"""The strict reader: every kind of wrong value is refused, by name and place."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from ds_engine.config.reader import (
    ConfigProblems,
    Positive,
    Probability,
    parse_json,
    problems_of,
    raise_problems,
    read_dataclass,
    read_json,
)
from ds_engine.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    size: Positive
    shape: Literal["round", "square"] = "round"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rate: float = 0.0
    share: Probability = 0.5
    flag: bool = False
    name: str | None = None
    parts: tuple[Inner, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    free: Any = None

    def check_fields(self, where: str) -> list[str]:
        return [f"{where}.flag needs a name"] if self.flag and self.name is None else []


def test_reads_every_kind() -> None:
    value = {
        "inner": {"size": 3},
        "rate": 2,
        "name": None,
        "parts": [{"size": 1, "shape": "square"}],
        "table": {"a": 1},
        "free": [1, {"b": 2}],
    }
    outer = read_dataclass(Outer, value, "run")
    assert outer == Outer(
        Inner(3), 2.0, parts=(Inner(1, "square"),), table={"a": 1}, free=[1, {"b": 2}]
    )
    assert isinstance(outer.rate, float)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "run.inner is missing; add it (an object)"),
        ({"inner": {}}, "run.inner.size is missing; add it (an integer, at least 1)"),
        ({"inner": 3}, "run.inner = 3 must be a JSON object"),
        ({"inner": {"size": 1.0}}, "run.inner.size = 1.0 must be an integer"),
        ({"inner": {"size": True}}, "run.inner.size = true must be an integer"),
        ({"inner": {"size": "3"}}, 'run.inner.size = "3" must be an integer'),
        ({"inner": {"size": None}}, "run.inner.size = null must be an integer"),
        ({"inner": {"size": 0}}, "run.inner.size = 0 must be at least 1"),
        ({"inner": {"size": 1, "shape": "rond"}}, 'did you mean "round"? Known: round, square'),
        ({"inner": {"size": 1}, "rate": True}, "run.rate = true must be a number"),
        ({"inner": {"size": 1}, "rate": float("nan")}, "run.rate = nan must be a finite number"),
        ({"inner": {"size": 1}, "share": 1}, "run.share = 1 must be at least 0 and below 1"),
        ({"inner": {"size": 1}, "flag": 1}, "run.flag = 1 must be true or false"),
        ({"inner": {"size": 1}, "flag": "True"}, 'run.flag = "True" must be true or false'),
        ({"inner": {"size": 1}, "flag": True}, "run.flag needs a name"),
        ({"inner": {"size": 1}, "name": 3}, "run.name = 3 must be a string"),
        ({"inner": {"size": 1}, "parts": {}}, "run.parts = {} must be a list"),
        ({"inner": {"size": 1}, "parts": "ab"}, 'run.parts = "ab" must be a list'),
        ({"inner": {"size": 1}, "parts": [{"size": 1}, {"size": 0}]}, "run.parts.1.size = 0"),
        ({"inner": {"size": 1}, "table": {"a": "b"}}, 'run.table.a = "b" must be an integer'),
        ({"inner": {"size": 1}, "tabel": {}}, 'run.tabel is not a known key; did you mean "table"'),
        ([], "run = [] must be a JSON object"),
    ],
)
def test_refuses(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_dataclass(Outer, value, "run")
    assert message in str(caught.value)


def test_lists_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_dataclass(Outer, {"inner": {"size": 0, "sharp": 1}, "rate": "x"}, "")
    assert len(problems_of(caught.value)) == 3
    assert "  3. rate" in str(caught.value)


def test_one_problem_is_not_numbered_and_repeats_are_dropped() -> None:
    with pytest.raises(ConfigProblems, match=r"^only this$"):
        raise_problems(["only this", "only this"])
    raise_problems([])
    assert problems_of(ConfigError("plain")) == ("plain",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', 'the key "a" stands twice'),
        ('{"b": {"a": 1, "a": 1}}', 'the key "a" stands twice'),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "1e999 is not JSON"),
        ('{"a": 1,\n  "b": }', "file.json, line 2, column 8"),
        ("{} {}", "file.json, line 1, column 4"),
        ("{'a': 1}", "file.json, line 1, column 2"),
        ("", "file.json, line 1, column 1"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_json_is_strict(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "file.json")
    assert message in str(caught.value)


def test_unreadable_files(tmp_path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ConfigError, match=r'modle\.json: No such file.*did you mean "model\.json"'):
        read_json(tmp_path / "modle.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_json(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 7\)"):
        read_json(tmp_path / "latin.json")
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "bom.json") == {"a": 1}
