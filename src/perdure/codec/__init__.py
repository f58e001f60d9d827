"""Codecs: convert values to bytes and back by their annotations. Data only, never pickle."""

from perdure.codec.codec import JSON, MSGPACK, Codec, JsonCodec, MsgpackCodec, fingerprint

__all__ = ["JSON", "MSGPACK", "Codec", "JsonCodec", "MsgpackCodec", "fingerprint"]
