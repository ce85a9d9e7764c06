"""The bytes of a step's exchange, by the buckets that are laid out for it."""

from __future__ import annotations

from hvfreeze.comm.gradient_exchange import Named, lay_out


def messages_of(named: Named, *, compression: str, size: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Return the bytes of each bucket's first and second sum over ranks."""
    buckets = lay_out(
        named, range(len(named)), compression=compression, rank=0, size=size, bucket_bytes=bucket_bytes, exponents={}
    )
    seconds = [bucket.advance(lambda wire, name: [], lambda handle: None) for bucket in buckets]
    return [(bucket.payload_bytes + bucket.tail_bytes, second) for bucket, second in zip(buckets, seconds, strict=True)]
