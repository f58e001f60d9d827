"""The cases of the store contract, one room per promise; `perdure.testing.store_contract` puts them together."""
