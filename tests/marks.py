"""Marks of cases."""

import pytest


def full(*values: object) -> object:
    """A case that is left to `make test-full`."""
    return pytest.param(*values, marks=pytest.mark.full)
