"""Weights from elsewhere."""

from . import official

__all__ = ["official"]
