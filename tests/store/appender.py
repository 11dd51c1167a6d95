"""A process that appends to a store, for tests of several writers at once.

Reads one JSON job a line from stdin and answers with one line each:
``{"place": ..., "options": {...}, "seeds": [...], "wait": seconds}``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def main() -> None:
    spec = importlib.util.spec_from_file_location("blocks", Path(__file__).with_name("conftest.py"))
    blocks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(blocks)
    from alchemi_xr.errors import StoreLockedError
    from alchemi_xr.store.writer import StoreWriter

    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        done, refused = [], []
        writer = StoreWriter(
            job["place"], lock_timeout=job["wait"], storage_options=job["options"] or None
        )
        for seed in job["seeds"]:
            try:
                writer.append(blocks.tagged_block(seed))
                done.append(seed)
            except StoreLockedError as error:
                refused.append(str(error))
        print(json.dumps({"done": done, "refused": refused}), flush=True)


if __name__ == "__main__":
    main()
