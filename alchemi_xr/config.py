"""Options of the process, each with its unit and default.

``set_options(key=value)`` sets for good, and as a context manager for a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from alchemi_xr.errors import ConfigError, nearest

__all__ = ["get_options", "option", "set_options"]

_DEFAULTS: dict[str, Any] = {
    # Bytes that a streaming pass (defragment, export, iter_blocks) holds at a time.
    "stream_bytes": 64 * 2**20,
    # Bytes of decoded chunks that all readers of this process keep together; "auto": a
    # sixteenth of the memory that is free at the first one.
    "cache_bytes": "auto",
    # "auto": live bars on a terminal, log lines elsewhere; "bar", "log" or "off".
    "progress": "auto",
    # Seconds without a heartbeat after which a writer's lease counts as dead.
    "lease_timeout": 60.0,
}

_options: dict[str, Any] = dict(_DEFAULTS)


def _check(key: str, value: Any) -> Any:
    if key not in _DEFAULTS:
        raise ConfigError("set_options", f"no option {key!r}. {nearest(key, _DEFAULTS)}")
    if key == "progress":
        if value not in ("auto", "bar", "log", "off"):
            raise ConfigError(
                "set_options", "progress", found=repr(value), expected="auto, bar, log or off"
            )
        return value
    if key == "cache_bytes":
        if value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                "set_options", key, found=repr(value), expected="bytes, a whole number, or 'auto'"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError("set_options", key, found=repr(value), expected="a positive number")
    return type(_DEFAULTS[key])(value)


def option(key: str) -> Any:
    """The value of one option."""
    return _options[key]


def get_options() -> Mapping[str, Any]:
    """All options with their values, as a copy."""
    return dict(_options)


class set_options:
    """Set options for good, or for a ``with`` block.

    Parameters
    ----------
    **options
        ``stream_bytes`` (bytes), ``cache_bytes`` (bytes of decoded chunks, or
        ``"auto"``), ``progress`` (``"auto"``, ``"bar"``, ``"log"``, ``"off"``),
        ``lease_timeout`` (s).

    Raises
    ------
    ConfigError
        Unknown option or wrong value; nothing is changed then.

    Examples
    --------
    >>> with set_options(progress="off"):
    ...     get_options()["progress"]
    'off'
    """

    def __init__(self, **options: Any) -> None:
        checked = {key: _check(key, value) for key, value in options.items()}
        self._before = {key: _options[key] for key in checked}
        _options.update(checked)

    def __enter__(self) -> set_options:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _options.update(self._before)
