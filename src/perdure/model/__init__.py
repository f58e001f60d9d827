"""Frozen records, ids and validation shared by all layers."""
