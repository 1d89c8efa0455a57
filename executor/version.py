"""The version of commplan that this executor belongs to."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["own_version"]


def own_version() -> str:
    """Return the installed version, or a sentence where the code is run without installing it."""
    try:
        return version("commplan")
    except PackageNotFoundError:
        return "not installed"
