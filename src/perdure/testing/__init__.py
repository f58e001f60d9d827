"""For those who test: the contract that every store passes."""

from perdure.testing.store_contract import StoreContract

__all__ = ["StoreContract"]
