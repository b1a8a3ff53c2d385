"""What the documentation shows exists: every ``ds-engine`` line parses, every file is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from launch.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "ds_configs/README.md")


def command_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / page).read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith("ds-engine "):
                    yield page, line.split("#")[0].strip()


LINES = list(command_lines())


def test_the_documentation_shows_commands() -> None:
    assert len(LINES) >= 12


@pytest.mark.parametrize(("page", "line"), LINES)
def test_command_parses(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line)[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        child = command.get_command(click.Context(command), arguments[0])
        assert child is not None, arguments[0]
        command, arguments = child, arguments[1:]
    # A path that only exists after a run must not fail the check of the options' names.
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            parameter.type.exists = False
    command.make_context(line, arguments)


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    rooms = "ds_engine|ds_configs|models|preprocessing|launch|tests"
    names = re.findall(rf"`((?:{rooms})/[\w./-]+)`", text)
    # ds_configs/README.md names files of its own folder (`models/...`) as well
    homes = (ROOT, (ROOT / page).parent)
    missing = [n for n in names if not any((home / n.rstrip("/")).exists() for home in homes)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text())
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []
