"""How arrays are cut and compressed: named profiles, and full control.

A profile answers for every array; a config by group or by field overrides it.
Sizes are rows of the first axis; the other axes are always whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import canonical_level
from alchemi_xr.errors import ConfigError, nearest

__all__ = [
    "DEFAULT_CHUNK_ROWS",
    "DEFAULT_PROFILE",
    "PROFILES",
    "ZarrArrayConfig",
    "ZarrWriteConfig",
    "as_config",
    "encoding",
]

DEFAULT_CHUNK_ROWS: dict[Level, int] = {"atom": 65_536, "system": 65_536, "edge": 262_144}
"""Rows of a chunk, whatever the length of the first write."""

_MAX_CHUNK_BYTES = 16 * 2**20
_MAX_RAW_BYTES = 8 * 2**20
_MAX_ROWS = 2**20
# An array is cut in so many chunks at least, for the tasks that write it.
_CHUNKS = 8
DEFAULT_PROFILE = "mixed"

PROFILES: dict[str, str] = {
    "mixed": "floats and pointers as in raw, all else as in fast: appends and shuffled reads "
    "at nearly the speed of raw, most of what compression saves",
    "raw": "no compression; chunk files can be memory-mapped",
    "fast": "blosc lz4 with shuffle and a checksum; decodes at the speed of memory",
    "balanced": "blosc zstd 3 with shuffle and a checksum",
    "small": "blosc zstd 9 with bit shuffle and a checksum",
    "lossy:<keepbits>": "atom and edge floats rounded to so many mantissa bits, then as balanced",
}


@dataclass(frozen=True)
class ZarrArrayConfig:
    """How one array, or all arrays of a group, are written.

    Parameters
    ----------
    compressors : None, codec, name, dict, or several of them, optional
        None leaves it to the profile; an empty tuple turns compression off.
    filters, serializer : codec, name or dict, optional
    chunk_size : int, optional
        Rows of a chunk.
    shard_size : int, optional
        Rows of a shard (one storage object), a multiple of ``chunk_size``.
    chunk_bytes, shard_bytes : int or str, optional
        The same by size in memory, such as ``"4MiB"``: the largest power of two
        of rows that does not exceed it, so that arrays of a level stay aligned.
    write_empty_chunks : bool
        Kept for scripts of nvalchemi-toolkit. Chunks of fill alone are always
        written: a chunk that is not there is how a lost file is recognised.

    Raises
    ------
    ConfigError
        A size is below 1, or the shard is no multiple of the chunk.
    """

    compressors: Any = None
    filters: Any = None
    serializer: Any = None
    chunk_size: int | None = None
    shard_size: int | None = None
    write_empty_chunks: bool = True
    chunk_bytes: int | str | None = None
    shard_bytes: int | str | None = None

    def __post_init__(self) -> None:
        for kind in ("chunk", "shard"):
            budget = getattr(self, f"{kind}_bytes")
            if budget is None:
                continue
            object.__setattr__(self, f"{kind}_bytes", _budget(budget, "ZarrArrayConfig"))
            if getattr(self, f"{kind}_size") is not None:
                raise ConfigError(
                    "ZarrArrayConfig", f"{kind}_size and {kind}_bytes are both given", mend="one"
                )
        for name in ("chunk_size", "shard_size"):
            size = getattr(self, name)
            if size is not None and (
                isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1
            ):
                raise ConfigError(
                    "ZarrArrayConfig", f"{name} must be at least 1 row", found=repr(size)
                )
        if self.shard_size is not None and self.chunk_size is not None:
            _check_multiple(self.shard_size, self.chunk_size, "ZarrArrayConfig")

    def over(self, other: ZarrArrayConfig) -> ZarrArrayConfig:
        """This config, with what it leaves open taken from another."""
        taken = {
            f.name: getattr(self, f.name)
            if getattr(self, f.name) is not None
            else getattr(other, f.name)
            for f in fields(self)
        }
        for kind in ("chunk", "shard"):
            size, budget = f"{kind}_size", f"{kind}_bytes"
            if taken[size] is not None and taken[budget] is not None:
                # Rows and bytes say the same thing: the stronger config decides.
                taken[budget if getattr(self, size) is not None else size] = None
        return ZarrArrayConfig(**taken)


@dataclass(frozen=True)
class ZarrWriteConfig:
    """How a store is written.

    Parameters
    ----------
    meta, core, custom : ZarrArrayConfig or mapping
        By group. Text and presence masks follow ``meta``.
    field_overrides : dict of str to ZarrArrayConfig or mapping
        By field; beats the group.
    profile : str
        One of ``PROFILES``; what the configs leave open.
    chunk_bytes, shard_bytes : int, str or mapping, optional
        Size of a chunk and of a shard in memory where no config says otherwise;
        one for all, or by level: ``{"atom": "8MiB", "edge": "16MiB"}``.

    Raises
    ------
    ConfigError
        A key or a profile is not known.
    """

    meta: ZarrArrayConfig = field(default_factory=ZarrArrayConfig)
    core: ZarrArrayConfig = field(default_factory=ZarrArrayConfig)
    custom: ZarrArrayConfig = field(default_factory=ZarrArrayConfig)
    field_overrides: Mapping[str, ZarrArrayConfig] = field(default_factory=dict)
    profile: str = DEFAULT_PROFILE
    chunk_bytes: Any = None
    shard_bytes: Any = None

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "shard_bytes"):
            object.__setattr__(self, name, _by_level(getattr(self, name), name))
        for name in ("meta", "core", "custom"):
            object.__setattr__(self, name, _array_config(getattr(self, name), name))
        overrides = {k: _array_config(v, k) for k, v in dict(self.field_overrides).items()}
        object.__setattr__(self, "field_overrides", overrides)
        _keepbits(self.profile)

    def for_array(self, group: str, name: str) -> ZarrArrayConfig:
        """The config of one array."""
        base: ZarrArrayConfig = getattr(self, group if group in ("core", "custom") else "meta")
        override = self.field_overrides.get(name)
        return base if override is None else override.over(base)

    def to_json(self) -> dict[str, Any]:
        """What of this differs from the defaults, in words that make a config again."""
        out: dict[str, Any] = {"profile": self.profile}
        for name in ("meta", "core", "custom"):
            entry = _array_to_json(getattr(self, name))
            if entry:
                out[name] = entry
        overrides = {k: _array_to_json(v) for k, v in self.field_overrides.items()}
        if overrides:
            out["field_overrides"] = overrides
        for name in ("chunk_bytes", "shard_bytes"):
            if getattr(self, name):
                out[name] = dict(getattr(self, name))
        return out


def _array_to_json(config: ZarrArrayConfig) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if value is None or f.name == "write_empty_chunks":
            continue
        out[f.name] = value if isinstance(value, (int, str)) else _codecs_to_json(value)
    return out


def _codecs_to_json(value: Any) -> Any:
    if isinstance(value, (str, Mapping)):
        return value
    if isinstance(value, Iterable):
        return [_codecs_to_json(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else str(value)


_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


def _budget(value: Any, where: str) -> int:
    """Bytes from a number or from text such as ``4MiB``."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", value)
        if match and match[2].lower() in _SIZES:
            try:
                value = int(float(match[1]) * _SIZES[match[2].lower()])
            except ValueError:
                match = None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(
            where, "this is no number of bytes", found=repr(value), expected="such as 4MiB"
        )
    return int(value)


def _by_level(value: Any, name: str) -> dict[Level, int]:
    levels: tuple[Level, ...] = ("atom", "edge", "system")
    if value is None:
        return {}
    if isinstance(value, Mapping):
        where = f"ZarrWriteConfig, {name}"
        return {
            canonical_level(level, where=where): _budget(v, where) for level, v in value.items()
        }
    return dict.fromkeys(levels, _budget(value, f"ZarrWriteConfig, {name}"))


def _fitting(budget: int, row_bytes: int) -> int:
    """The largest power of two of rows within a number of bytes."""
    return 1 << max(0, (budget // max(1, row_bytes)).bit_length() - 1)


def as_config(config: Any) -> ZarrWriteConfig:
    """A config from what users give: None, a profile's name, a mapping, or one.

    Raises
    ------
    ConfigError
    """
    if config is None:
        return ZarrWriteConfig()
    if isinstance(config, ZarrWriteConfig):
        return config
    if isinstance(config, str):
        return ZarrWriteConfig(profile=config)
    if isinstance(config, ZarrArrayConfig):
        return ZarrWriteConfig(core=config, custom=config)
    if isinstance(config, Mapping):
        _check_keys(config, ZarrWriteConfig)
        return ZarrWriteConfig(**config)
    raise ConfigError(
        "config",
        "this is no write config",
        found=type(config).__name__,
        expected="a profile's name, a ZarrWriteConfig or a mapping",
    )


def _array_config(value: Any, where: str) -> ZarrArrayConfig:
    if isinstance(value, ZarrArrayConfig):
        return value
    if value is None:
        return ZarrArrayConfig()
    if isinstance(value, Mapping):
        _check_keys(value, ZarrArrayConfig)
        return ZarrArrayConfig(**value)
    raise ConfigError(
        f"ZarrWriteConfig, {where}",
        "this is no array config",
        found=type(value).__name__,
        expected="a ZarrArrayConfig or a mapping",
    )


def _check_keys(value: Mapping[str, Any], cls: type) -> None:
    known = [f.name for f in fields(cls)]
    for key in value:
        if key not in known:
            raise ConfigError(cls.__name__, f"{key!r} is not known. {nearest(str(key), known)}")


def _check_multiple(shard: int, chunk: int, where: str) -> None:
    if shard % chunk:
        raise ConfigError(
            where,
            "shard_size must be a multiple of chunk_size",
            found=f"{shard} over {chunk}",
        )


def _keepbits(profile: str) -> int | None:
    """Mantissa bits that a lossy profile keeps; None for the others."""
    if profile in ("mixed", "raw", "fast", "balanced", "small"):
        return None
    name, _, bits = profile.partition(":")
    if name == "lossy" and bits.isdigit() and 1 <= int(bits) <= 52:
        return int(bits)
    raise ConfigError(
        "profile",
        f"{profile!r} is not known. {nearest(profile, PROFILES)}",
        expected=list(PROFILES),
    )


def _named(codec: Any, dtype: np.dtype[Any]) -> Any:
    """A codec from its short name; anything else is zarr's to understand."""
    if not isinstance(codec, str):
        return codec
    name, _, argument = codec.partition(":")
    level = int(argument) if argument else None
    if name == "zstd":
        return ZstdCodec(level=3 if level is None else level)
    if name == "gzip":
        return GzipCodec(level=5 if level is None else level)
    if name in ("lz4", "blosc", "blosc-lz4"):
        return _blosc("lz4", 5 if level is None else level, "shuffle", dtype)
    if name == "blosc-zstd":
        return _blosc("zstd", 3 if level is None else level, "shuffle", dtype)
    if name == "pcodec":
        return {"name": "numcodecs.pcodec", "configuration": {"level": level or 8}}
    if name == "bitround":
        return {"name": "numcodecs.bitround", "configuration": {"keepbits": level or 12}}
    if name == "delta":
        return {"name": "numcodecs.delta", "configuration": {"dtype": dtype.str}}
    if name == "shuffle":
        size = level or dtype.itemsize
        return {"name": "numcodecs.shuffle", "configuration": {"elementsize": size}}
    if name == "crc32c":
        return Crc32cCodec()
    known = (
        *("zstd", "gzip", "lz4", "blosc-lz4", "blosc-zstd", "pcodec", "bitround", "delta"),
        *("shuffle", "crc32c"),
    )
    raise ConfigError("codec", f"{codec!r} is not known. {nearest(name, known)}")


def _blosc(cname: str, level: int, shuffle: str, dtype: np.dtype[Any]) -> BloscCodec:
    size = max(1, dtype.itemsize)
    return BloscCodec(typesize=size, cname=cname, clevel=level, shuffle=shuffle)  # type: ignore[arg-type]


def _several(value: Any, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        value = (value,)
    return tuple(_named(codec, dtype) for codec in value)


def _profile_codecs(
    profile: str, dtype: np.dtype[Any], level: Level, *, is_text: bool, is_field: bool
) -> dict[str, Any]:
    # Blosc decodes a truncated chunk to garbage without a word, so each compressed
    # one carries a checksum, checked at 3.7 GB/s.
    keepbits = _keepbits(profile)
    if is_text:
        return {"compressors": () if profile == "raw" else (ZstdCodec(level=3), Crc32cCodec())}
    # Floats of a calculation hardly compress (1.1 times), atomic numbers and masks do
    # (25 to 110 times); and what is raw can be mapped, and grows in place.
    is_pointer = not is_field and dtype.kind in "iu"
    if profile == "raw" or (profile == "mixed" and (is_pointer or dtype.kind in "fc")):
        return {"compressors": ()}
    if profile in ("mixed", "fast"):
        return {"compressors": (_blosc("lz4", 5, "shuffle", dtype), Crc32cCodec())}
    if profile == "small":
        return {"compressors": (_blosc("zstd", 9, "bitshuffle", dtype), Crc32cCodec())}
    codecs: dict[str, Any] = {"compressors": (_blosc("zstd", 3, "shuffle", dtype), Crc32cCodec())}
    if keepbits is not None and is_field and level != "system" and dtype.kind == "f":
        mantissa = np.finfo(dtype).nmant
        if keepbits < mantissa:
            codecs["filters"] = (_named(f"bitround:{keepbits}", dtype),)
    return codecs


def _is_raw(arguments: Mapping[str, Any]) -> bool:
    return not any(arguments.get(k) for k in ("compressors", "filters", "serializer"))


def encoding(
    config: ZarrWriteConfig,
    group: str,
    name: str,
    level: Level,
    dtype: np.dtype[Any],
    tail: tuple[int, ...],
    *,
    is_text: bool = False,
    total: int = 0,
) -> dict[str, Any]:
    """Arguments for zarr's ``create_array``: chunks, shards and codecs of one array.

    Parameters
    ----------
    total : int
        Rows that the array will have, as far as is known when it is made: raw chunks
        of a large one are longer, so that it is not thousands of small files.

    Raises
    ------
    ConfigError
        The shard is no multiple of the chunk that the defaults give.
    """
    chosen = config.for_array(group, name)
    is_field = group in ("core", "custom")
    arguments = _profile_codecs(config.profile, dtype, level, is_text=is_text, is_field=is_field)
    if chosen.compressors is not None:
        arguments["compressors"] = _several(chosen.compressors, dtype)
    if chosen.filters is not None:
        arguments["filters"] = _several(chosen.filters, dtype)
    if chosen.serializer is not None and not is_text:
        arguments["serializer"] = _named(chosen.serializer, dtype)
    row_bytes = (64 if is_text else dtype.itemsize) * int(np.prod(tail, dtype=np.int64))
    shard = chosen.shard_size
    shard_budget = chosen.shard_bytes or config.shard_bytes.get(level)
    if shard is None and shard_budget is not None:
        shard = _fitting(int(shard_budget), row_bytes)
    rows = chosen.chunk_size
    if rows is None:
        chunk_budget = chosen.chunk_bytes or config.chunk_bytes.get(level)
        rows = DEFAULT_CHUNK_ROWS[level]
        if chunk_budget is not None:
            rows = _fitting(int(chunk_budget), row_bytes)
        # Halving keeps every chunk a divisor of the default, so that one
        # alignment holds for all arrays of a level.
        while chunk_budget is None and rows > 64 and rows * row_bytes > _MAX_CHUNK_BYTES:
            rows //= 2
        if shard is not None and shard < rows:
            rows = shard
        elif shard is None and chunk_budget is None and (group == "meta" or _is_raw(arguments)):
            # What is raw is mapped or patched in place: nothing reads or writes a whole
            # chunk for a few rows; and masks are next to nothing once compressed.
            # Doubling keeps it a multiple of the default.
            most = min(total // _CHUNKS, _MAX_ROWS, _MAX_RAW_BYTES // max(1, row_bytes))
            while 2 * rows <= most:
                rows *= 2
    # An axis of length 0 still needs a chunk length.
    whole = tuple(max(1, n) for n in tail)
    arguments["chunks"] = (rows, *whole)
    if shard is not None:
        if chosen.shard_size is None:
            shard = max(1, shard // rows) * rows
        _check_multiple(shard, rows, f"array {name!r}")
        arguments["shards"] = (shard, *whole)
    return arguments
