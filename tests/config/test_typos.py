"""The promise of the strict reader: no misspelt key ever passes, at any level, in any section."""

import copy
import dataclasses
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.load import read_run
from ds_engine.errors import ConfigError
from models.registry import read_model
from tests.config.samples import MODELS, full_run

FULL = full_run()


def key_places(tree: object, prefix: tuple = ()) -> list[tuple]:
    """The path of every key in an object, list indices included."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    places = []
    for key, value in items:
        if isinstance(tree, dict):
            places.append((*prefix, key))
        if isinstance(value, dict | list):
            places += key_places(value, (*prefix, key))
    # Values of the kind "any" are DeepSpeed's own business.
    return [place for place in places if not isinstance(place[-1], int)]


PLACES = [place for place in key_places(FULL) if "tags" not in place[:-1]]


MODEL_PLACES = {
    family: key_places(dataclasses.asdict(model), ("model",)) for family, model in MODELS.items()
}


@st.composite
def typos(draw, places=PLACES) -> tuple[tuple, str]:
    """A place, and its key with one character inserted, removed, replaced or two swapped."""
    place = draw(st.sampled_from(places))
    key = place[-1]
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_-"))
    wrong = draw(
        st.sampled_from(
            [
                key[:at] + letter + key[at:],
                key[:at] + key[at + 1 :],
                key[:at] + letter + key[at + 1 :],
                key[:at] + key[at : at + 2][::-1] + key[at + 2 :],
                key.upper(),
            ]
        )
    )
    return place, wrong


def read_all(run: dict) -> None:
    read_model(read_run(run).model)


def test_the_sample_itself_is_accepted() -> None:
    read_all(FULL)
    assert len(PLACES) > 200


def check_typo(run: dict, place: tuple, wrong: str) -> None:
    target = run
    for key in place[:-1]:
        target = target[key]
    if wrong in target:
        return
    target[wrong] = target.pop(place[-1])
    with pytest.raises(ConfigError) as caught:
        read_all(run)
    path = ".".join(map(str, (*place[:-1], wrong)))
    lines = [line for line in str(caught.value).splitlines() if f"{path} is not" in line]
    assert lines or not wrong, str(caught.value)
    hint = lines[0].split(" is not", 1)[1] if lines else str(caught.value)
    assert re.search(rf"(?<!\w){place[-1]}(?!\w)", hint), hint


@given(typos())
def test_every_typo_is_refused_and_the_right_key_is_named(typo) -> None:
    check_typo(copy.deepcopy(FULL), *typo)


@pytest.mark.parametrize("family", ["t5", "bert"])
@given(st.data())
def test_every_typo_in_a_model_is_refused(family, data) -> None:
    run = {**copy.deepcopy(FULL), "model": dataclasses.asdict(MODELS[family])}
    check_typo(run, *data.draw(typos(MODEL_PLACES[family])))


@given(st.sampled_from(PLACES), st.sampled_from([object(), [], {}, "x", True, None, -1, 2.5]))
def test_a_value_of_any_kind_is_read_or_refused_but_never_crashes(place, value) -> None:
    run = copy.deepcopy(FULL)
    target = run
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    try:
        read_all(run)
    except ConfigError as error:
        assert str(error)
