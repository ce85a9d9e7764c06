"""Image files for tests, also of kinds that Pillow reads and cannot write."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from hvfreeze.data.images import FileSource


def write_image(path: Path, *, width: int = 8, height: int = 8, colour: tuple[int, int, int] = (0, 0, 0)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), colour).save(path)


def source(*paths: Path, **more: Any) -> FileSource:
    """Files of one folder, of 8 x 8 pixels unless `more` says otherwise."""
    settings: dict[str, Any] = {"image_shape": (3, 8, 8), "side": None, **more}
    return FileSource(root=paths[0].parent, paths=tuple(path.name for path in paths), **settings)


def png(
    width: int,
    height: int,
    *,
    depth: int = 8,
    kind: int = 2,
    pixels: bytes = b"\0",
    chunks: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    framed = (struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
