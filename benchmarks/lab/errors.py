"""What goes wrong in a lab."""

__all__ = ["LabError"]


class LabError(Exception):
    """The lab could not be made, or an experiment in it failed."""
