"""Small zlib streams, many of them: by libdeflate where the package ``deflate`` is installed."""

from __future__ import annotations

import zlib
from collections.abc import Callable

__all__ = ["Inflate"]

# Room for what is packed better is not kept for all the others.
_MOST = 64.0


class Inflate:
    """The bytes of zlib streams, whose sizes are guessed from those before them.

    Examples
    --------
    >>> bytes(Inflate()(zlib.compress(b"many " * 3)))
    b'many many many '
    """

    def __init__(self) -> None:
        self._ratio = 4.0
        self._fast, self._error = _libdeflate()

    def __call__(self, packed: bytes) -> bytes | bytearray:
        """The bytes of a stream.

        Raises
        ------
        zlib.error
            The stream is damaged, or cut off.
        """
        if self._fast is not None:
            try:
                return self._fast(packed, int(self._ratio * len(packed)) + 1024)
            except self._error:
                pass  # larger than was guessed, or damaged: zlib says what it is
        text = zlib.decompress(packed)
        self._ratio = max(self._ratio, min(_MOST, 1.5 * len(text) / len(packed)))
        return text


def _libdeflate() -> tuple[Callable[[bytes, int], bytearray] | None, type[Exception]]:
    try:
        from deflate import DeflateError, zlib_decompress
    except ImportError:
        return None, zlib.error
    return zlib_decompress, DeflateError
