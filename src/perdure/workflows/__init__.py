"""The authoring API: what workflow and step code imports and calls. Knows no runner, store or engine."""
