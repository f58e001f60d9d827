"""The store's keys that sign the tokens of deferreds: their name, and how a new one comes into use."""

from __future__ import annotations

KEYS = "deferred"
KEYS_EVERY = 60.0  # seconds between two looks for new keys
IN_USE_AFTER = 2 * KEYS_EVERY  # a new key signs from then on, when every worker has read it
