"""Fixtures of the command-line tests."""

from tests.cli.cli_runner import shop, shop_anywhere, shop_everywhere

__all__ = ["shop", "shop_anywhere", "shop_everywhere"]
