"""The comment line of an extended XYZ frame: keys and values.

Ours, because every dialect in the wild must pass: quotes of three kinds,
escaped quotes, brackets (nested ones too), JSON, bare words, blanks around
``=``, Fortran exponents. Where it differs from ASE it does so on purpose:
nested brackets keep their shape, backslashes that escape nothing stay, and
a comment without any ``=`` is a title, not a list of flags.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from alchemi_xr._typing import NDArray

__all__ = ["Value", "parse_comment", "parse_value", "split_comment"]

Value: TypeAlias = "NDArray | str"

_PAIRS = re.compile(r'([^\s="]+)\s*=\s*(?:"([^"]*)"|([^\s"]\S*))|(\S+)')
_ODD = re.compile(r"[\\'{}\[\]]")
_SEPARATORS = re.compile(r"[\s,]+")
_INT = re.compile(r"[-+]?\d+\Z")
_FLOAT = re.compile(
    r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eEdD][-+]?\d+)?\Z|[-+]?(?:nan|inf|infinity)\Z", re.IGNORECASE
)
_BOOLS = {
    "T": True,
    "F": False,
    "true": True,
    "false": False,
    "True": True,
    "False": False,
    "TRUE": True,
    "FALSE": False,
}
_CLOSING = {'"': '"', "'": "'", "{": "}", "[": "]"}


def split_comment(text: str) -> list[tuple[str, str]]:
    """Keys and raw values of a comment line, in order; a bare word has the value ``"T"``.

    Examples
    --------
    >>> split_comment('energy=-1.5 title="say \\\\"hi\\\\"" bare')
    [('energy', '-1.5'), ('title', 'say "hi"'), ('bare', 'T')]
    """
    if not _ODD.search(text):
        pairs = []
        for key, quoted, bare, word in _PAIRS.findall(text):
            if word:
                if "=" in word or '"' in word:
                    break
                pairs.append((word, "T"))
            elif '"' in bare:
                break
            else:
                pairs.append((key, quoted or bare))
        else:
            return pairs
    elif "\\" not in text:
        pairs = _bracketed_in_quotes(text)
        if pairs:
            return pairs
    return _split_slowly(text)


def _bracketed_in_quotes(text: str) -> list[tuple[str, str]]:
    """The pairs when brackets stand inside double quotes only, else nothing."""
    pairs = []
    for key, quoted, bare, word in _PAIRS.findall(text):
        if word or _ODD.search(bare) or '"' in bare or _ODD.search(key):
            return []
        pairs.append((key, quoted or bare))
    return pairs


def _split_slowly(text: str) -> list[tuple[str, str]]:
    """Character by character: for escapes, single quotes and brackets."""
    pairs: list[tuple[str, str]] = []
    at, end = 0, len(text)
    while at < end:
        if text[at].isspace():
            at += 1
            continue
        key, at = _word(text, at, stop_at_equals=True)
        after = at
        while after < end and text[after].isspace():
            after += 1
        if after < end and text[after] == "=":
            after += 1
            while after < end and text[after].isspace():
                after += 1
            value, at = _word(text, after, stop_at_equals=False)
            if key:
                pairs.append((key, value))
        elif key:
            pairs.append((key, "T"))
        else:
            at += 1
    return pairs


def _word(text: str, at: int, *, stop_at_equals: bool) -> tuple[str, int]:
    """One key or value from ``at``: quoted or bracketed parts and what touches them."""
    out: list[str] = []
    end = len(text)
    while at < end:
        char = text[at]
        if char.isspace() or (stop_at_equals and char == "="):
            break
        if char in "\"'":
            part, at = _quoted(text, at + 1, char)
            out.append(part)
        elif char in "{[":
            part, at = _bracketed(text, at)
            out.append(part)
        elif char == "\\" and at + 1 < end and text[at + 1] in "\"'\\":
            out.append(text[at + 1])
            at += 2
        else:
            out.append(char)
            at += 1
    return "".join(out), at


def _quoted(text: str, at: int, quote: str) -> tuple[str, int]:
    out: list[str] = []
    end = len(text)
    while at < end:
        char = text[at]
        if char == "\\" and at + 1 < end and text[at + 1] in "\"'\\n":
            out.append("\n" if text[at + 1] == "n" else text[at + 1])
            at += 2
        elif char == quote:
            return "".join(out), at + 1
        else:
            out.append(char)
            at += 1
    return "".join(out), at


def _bracketed(text: str, at: int) -> tuple[str, int]:
    """From an opening bracket to the one that closes it.

    One level is only a delimiter and is taken off; nested brackets stay, for
    they hold the shape.
    """
    begin, depth, nested = at, 0, False
    while at < len(text):
        char = text[at]
        if char in "{[":
            depth += 1
            nested |= depth > 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                inside = text[begin + 1 : at]
                return (text[begin : at + 1] if nested else inside), at + 1
        at += 1
    return text[begin + 1 :], at


@lru_cache(maxsize=8192)
def parse_value(raw: str) -> Value:
    """A raw value as a number, an array of numbers or bools, or the text itself.

    Examples
    --------
    >>> parse_value("1.0D+2"), parse_value("T F"), parse_value("650 eV")
    (array(100.), array([ True, False]), '650 eV')
    """
    if raw.startswith("_JSON"):
        return _from_json(raw[5:].strip())
    if raw[:2] in ("[[", "{{", "[{", "{["):
        return _from_json(raw.translate(str.maketrans("{}", "[]")), otherwise=raw)
    tokens = [t for t in _SEPARATORS.split(raw) if t]
    if not tokens:
        return raw
    values: list[float] | list[int] | list[bool]
    if all(map(_INT.match, tokens)) and max(map(len, tokens)) < 300:
        values = [int(t) for t in tokens]
        if any(not -(2**63) <= v < 2**63 for v in values):
            # From the text, as ASE does: -0 has a sign then.
            values = [float(t) for t in tokens]
    elif all(map(_FLOAT.match, tokens)):
        values = [_to_float(t) for t in tokens]
    elif all(t in _BOOLS for t in tokens):
        values = [_BOOLS[t] for t in tokens]
    else:
        return raw
    array = np.array(values[0] if len(values) == 1 else values)
    array.flags.writeable = False
    return array


def _to_float(token: str) -> float:
    try:
        return float(token)
    except ValueError:  # 1.0D+00
        return float(token.replace("D", "E").replace("d", "e"))


def _from_json(text: str, otherwise: str | None = None) -> Value:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text if otherwise is None else otherwise
    if isinstance(value, str):
        return value
    try:
        array = np.array(value)
    except ValueError:  # not rectangular
        return text
    if array.dtype.kind not in "bif" or array.size == 0:
        return text
    array.flags.writeable = False
    return array


def parse_comment(text: str) -> tuple[list[tuple[str, str]], str]:
    """Keys and raw values in order, and the ``Properties`` string, empty if none.

    A comment without any ``=`` is a title and comes under the key ``comment``.
    """
    if "=" not in text:
        title = text.strip()
        return ([("comment", title)] if title else []), ""
    properties = ""
    pairs = []
    for pair in split_comment(text):
        if pair[0] == "Properties" or pair[0] == "properties":
            properties = pair[1]
        else:
            pairs.append(pair)
    return pairs, properties
