"""Refuses to run when ``models``, ``launch`` or ``preprocessing`` is somebody else's package.

These are common names: another installed package or a folder in the working directory may shadow
them, and half of each would then run together. Every entry point checks first.
"""

import importlib.util
import sys
from pathlib import Path

from ds_engine.errors import LaunchError

PACKAGES = ("ds_engine", "models", "preprocessing", "launch")


def check_packages() -> Path:
    """Checks that the four packages stand beside each other.

    Returns:
        Their common parent folder.

    Raises:
        LaunchError: Naming both folders, or the package that is missing.
    """
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        found = _folder(name)
        if found is None:
            raise LaunchError(
                f"the package {name} is not found beside {home / 'launch'}; restore the checkout, "
                "or install it with `pip install -e .`"
            )
        if found.parent != home:
            raise LaunchError(
                f"the package {name} would come from {found}, but ds-engine is in {home}; another "
                f"package of that name shadows it: start elsewhere, or put {home} first in "
                "PYTHONPATH"
            )
    return home


def check_rank_imports() -> None:
    """The same check inside a rank, where the packages may be loaded already.

    Raises:
        LaunchError: Naming both folders.
    """
    home = check_packages()
    for name in PACKAGES:
        origin = getattr(sys.modules.get(name), "__file__", None)
        if origin is not None and Path(origin).resolve().parent.parent != home:
            raise LaunchError(
                f"this rank has loaded {name} from {Path(origin).parent}, but ds-engine is in "
                f"{home}; start ranks as `python -P -m launch.train`"
            )


def _folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin).resolve().parent
    # A folder without __init__.py: a namespace package, certainly not ours.
    locations = list(spec.submodule_search_locations or [])
    return Path(locations[0]).resolve() if locations else None
