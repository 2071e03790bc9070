"""The methods that studies compare, and how one is trained and evaluated."""

from .methods import Method

__all__ = ["Method"]
