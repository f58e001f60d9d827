"""The cases of the store contract, one module per guarantee; `perdure.testing.store_contract` combines them."""
