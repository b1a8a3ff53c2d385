"""The command line: exit codes, messages, and the guard of the four packages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch import guard
from launch.cli import COMMANDS, cli
from tests.config.samples import small_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_file(tmp_path) -> str:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run()))
    return str(path)


def call(*arguments: str):
    return CliRunner().invoke(cli, list(arguments))


def test_help_lists_every_command_and_gives_an_example() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)
    assert "Example: ds-engine" in result.output


def test_version() -> None:
    assert call("--version").output.startswith("ds-engine ")


def test_a_misspelt_command_is_named() -> None:
    result = call("conifg")
    assert result.exit_code == 2
    assert 'no command "conifg"; did you mean "config"?' in result.output


@pytest.mark.parametrize("name", ["check", "show", "keys"])
def test_config_commands_have_an_example(name) -> None:
    assert f"Example: ds-engine config {name}" in call("config", name, "--help").output


@pytest.mark.parametrize("name", [*COMMANDS, "tokenizer train"])
def test_every_command_has_an_example_of_itself(name) -> None:
    assert f"Example: ds-engine {name}" in call(*name.split(), "--help").output


def test_check_prints_what_the_run_means(run_file) -> None:
    result = call("config", "check", run_file, "--world-size", "4")
    assert result.exit_code == 0
    for text in ("4 ranks = tensor 2", "8 samples per step", "parameters", "GiB", "FLOPs"):
        assert text in result.output


def test_check_fails_with_the_exit_code_of_configurations(run_file) -> None:
    result = call("config", "check", run_file, "--world-size", "3", "--set", "parallel.context=2")
    assert result.exit_code == 2
    assert "error: 2 problems in the configuration:\n  1. " in result.output


def test_show_prints_the_resolved_run(run_file) -> None:
    result = call("config", "show", run_file, "--set", "training.steps=3")
    assert json.loads(result.output)["training"]["steps"] == 3
    assert call("config", "show", run_file + "x").exit_code == 2


def test_keys_can_be_narrowed() -> None:
    lines = call("config", "keys", "training.lr_schedule").output.splitlines()
    assert all("`training.lr_schedule" in line for line in lines[2:])
    assert len(lines) > 5
    result = call("config", "keys", "trainig")
    assert result.exit_code == 2
    assert 'did you mean "training"' in result.output


def test_the_four_packages_stand_beside_each_other() -> None:
    assert guard.check_packages() == ROOT
    guard.check_rank_imports()


def started(folder: Path, code: str) -> subprocess.CompletedProcess:
    # The folder comes first on the path, as the working directory of a user does.
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; "
    command = [sys.executable, "-P", "-c", paths + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.parametrize("with_init", [True, False])
def test_a_shadowing_package_is_refused_and_named(tmp_path, with_init) -> None:
    (tmp_path / "models").mkdir()
    if with_init:
        (tmp_path / "models/__init__.py").write_text("")
    done = started(tmp_path, "from launch.cli import main; main()")
    if with_init:
        assert done.returncode == 5
        assert f"models would come from {tmp_path / 'models'}" in done.stderr
        assert str(ROOT) in done.stderr
    else:
        # A folder without __init__.py does not shadow a package later on the path.
        assert done.returncode != 5


def test_a_rank_that_has_loaded_another_package_is_refused(tmp_path) -> None:
    (tmp_path / "preprocessing.py").write_text("")
    code = (
        "import preprocessing; sys.path.pop(0); "
        "import launch.guard as guard; guard.check_rank_imports()"
    )
    done = started(tmp_path, code)
    assert "LaunchError" in done.stderr
    assert "preprocessing" in done.stderr


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(guard, "PACKAGES", ("ds_engine", "no_such_package"))
    with pytest.raises(guard.LaunchError, match="no_such_package is not found beside"):
        guard.check_packages()
