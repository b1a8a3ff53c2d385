"""The tiny run of this folder's tests, trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.tiny import whole_body, write_run
from tests.worlds import run_world


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``run.json``, data, a tokenizer and the finished, uninterrupted run."""
    folder = tmp_path_factory.mktemp("home")
    write_run(folder)
    assert run_world(2, whole_body, folder) == [0, 0]
    return folder
