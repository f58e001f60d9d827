"""Payloads: values to bytes and back, typed by annotations, data only."""

from perdure.codec.codec import JSON, MSGPACK, Codec, JsonCodec, MsgpackCodec, fingerprint

__all__ = ["JSON", "MSGPACK", "Codec", "JsonCodec", "MsgpackCodec", "fingerprint"]
