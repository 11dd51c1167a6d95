from collections.abc import Buffer  # type: ignore[attr-defined]

MAX_PAIRS: int
LOWEST: int
HIGHEST: int

def table(
    text: Buffer, ranges: int, n: int, words: int, count: int, loose: bool, symbols: int, /
) -> int: ...
def frames(
    text: Buffer, start: int, at_end: bool, out: int, room: int, /
) -> tuple[int, int, int]: ...
def pairs(
    text: Buffer, ranges: int, step: int, n: int, shapes: int, spans: int, /
) -> list[tuple[int, list[tuple[int, int, int, int, str, int]]]]: ...
def numbers(
    text: Buffer, spans: int, step: int, n: int, words: int, whole: bool, out: int, /
) -> int: ...
def arrays(
    text: Buffer, cells: int, room: int, used: int, rest: int, /
) -> tuple[int, int, bytes | None, bytes | None, int, int, int] | None: ...
def set_powers(table: bytes, /) -> None: ...
