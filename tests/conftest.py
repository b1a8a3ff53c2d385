"""Fixtures for all areas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from tests.tables import CURRENT, TITLES, render
from tests.worlds import RankError, World


class WarmWorlds:
    """Worlds of several sizes, started when first asked for and kept for the session."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``body(rank, *args)`` on ``size`` live ranks; what each returned.

        A world in which a rank failed is not used again.
        """
        if size not in self._worlds:
            self._worlds[size] = World(size)
        try:
            return self._worlds[size].run(body, *args)
        except RankError:
            del self._worlds[size]
            raise

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


def _nothing(rank: int) -> None:
    pass


@pytest.fixture(scope="session")
def warm_worlds() -> Iterator[WarmWorlds]:
    worlds = WarmWorlds()
    worlds.run(2, _nothing)  # the fork server's imports are not the first test's
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def warm_world(warm_worlds: WarmWorlds) -> Callable[..., list[Any]]:
    """``warm_world(size, body, *args)``: the answers of ``body(rank, *args)`` on live ranks.

    The body is a module-level function; ranks are not fresh, so it must leave nothing behind.
    """
    return warm_worlds.run


@pytest.fixture(autouse=True)
def running_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets helpers of a test put figures into the tables at the end."""
    token = CURRENT.set(request.node)
    yield
    CURRENT.reset(token)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the tables of what passed."""
    noted = [
        entry
        for report in terminalreporter.stats.get("passed", [])
        for entry in report.user_properties
        if report.when == "call"
    ]
    for table, title in TITLES.items():
        cells = [cell for name, cell in noted if name == table]
        if cells:
            terminalreporter.write_sep("=", title)
            for line in render(cells):
                terminalreporter.write_line(line)


def pytest_configure() -> None:
    """Hypothesis measures wall time, which a shared machine stretches: no deadline by the clock."""
    hypothesis.settings.register_profile("shared machine", deadline=None)
    hypothesis.settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--refresh-golden",
        action="store_true",
        help="write the pinned figures of tests/golden anew",
    )
