"""Frozen records, ids and validation shared by all layers. Knows no clock, store, codec or workflow code."""
