"""Stores: the protocol (`protocol`, `writes`, `results`) and its implementations, one package each."""
