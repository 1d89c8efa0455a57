"""commplan: which parallel layout and which collectives, how fast, and why not the others."""

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0"
