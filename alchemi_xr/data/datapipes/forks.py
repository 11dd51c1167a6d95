"""Locks that a forked child finds free.

A fork copies a lock as it is, and the thread that would give it back is not
copied: without this, a child that was forked while a thread read stands still at
its first batch.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["Renewable", "renew_in_child"]


class Renewable(Protocol):
    """What has something to renew."""

    def renew(self) -> None:
        """Make locks anew and forget what a thread of the parent would have brought."""


_HOLDERS: WeakSet[Renewable] = WeakSet()


def renew_in_child(holder: Renewable) -> None:
    """Call ``holder.renew()`` in every process that is forked off from now on."""
    _HOLDERS.add(holder)


def _after_fork() -> None:
    for holder in list(_HOLDERS):
        holder.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
