"""Fixtures of the command line's tests."""

from tests.cli.kit import shop

__all__ = ["shop"]
