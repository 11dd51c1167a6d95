"""A random life of a store agrees with a list in Python."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from alchemi_xr.data.block import Block
from alchemi_xr.errors import StaleSnapshotError
from alchemi_xr.etl import sort
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import verify

CONFIGS = [
    {"core": {"chunk_size": 4}, "custom": {"chunk_size": 3}, "meta": {"chunk_size": 5}},
    {"core": {"chunk_size": 2, "shard_size": 4}, "meta": {"chunk_size": 3}},
    {"core": {"chunk_size": 1}, "meta": {"chunk_size": 1}, "profile": "raw"},
]


def machine(make, blocks, same):
    class Life(RuleBasedStateMachine):
        @initialize(block=blocks(same_dtypes=True), config=st.sampled_from(CONFIGS))
        def write(self, block, config):
            self.folder = Path(tempfile.mkdtemp())
            self.path = self.folder / "a.zarr"
            self.config = config
            self.writer = StoreWriter(self.path, config)
            self.writer.write(block)
            self.parts = [block]
            self.alive = [True] * block.num_samples
            self.held = None
            self.rewrites = 0
            self.customs = 0

        @property
        def whole(self):
            return Block.concat(self.parts)

        @rule(block=blocks(same_dtypes=True))
        def append(self, block):
            self.writer.append(block)
            self.parts.append(block)
            self.alive += [True] * block.num_samples

        @rule(
            given=st.lists(blocks(same_dtypes=True), min_size=1, max_size=3),
            max_bytes=st.sampled_from([0, 2_000, 1 << 20]),
            fails=st.booleans(),
            data=st.data(),
        )
        def transaction(self, given, max_bytes, fails, data):
            alive = list(self.alive)
            try:
                with self.writer.transaction(max_bytes=max_bytes):
                    for block in given:
                        self.writer.append(block)
                        alive += [True] * block.num_samples
                        index = data.draw(st.lists(st.integers(0, len(alive) - 1), max_size=3))
                        self.writer.delete(index)
                        for i in index:
                            alive[i] = False
                    if fails:
                        raise KeyError
            except KeyError:
                return
            self.parts += given
            self.alive = alive

        @rule(data=st.data())
        def delete(self, data):
            index = (
                data.draw(st.lists(st.integers(-len(self.alive), len(self.alive) - 1)))
                if self.alive
                else []
            )
            self.writer.delete(index)
            for i in index:
                self.alive[i] = False

        @rule(data=st.data())
        def undelete(self, data):
            mask = data.draw(
                st.lists(st.booleans(), min_size=len(self.alive), max_size=len(self.alive))
            )
            self.writer.undelete(np.array(mask, dtype=bool))
            self.alive = [a or m for a, m in zip(self.alive, mask, strict=True)]

        @rule()
        def defragment(self):
            self.writer.defragment()
            self.parts = [self.whole.take(np.flatnonzero(self.alive))]
            self.alive = [True] * self.parts[0].num_samples
            self.rewrites += 1

        @rule(ascending=st.booleans())
        def sort(self, ascending):
            sort(self.path, "num_atoms", ascending=ascending, threads=1, progress=False)
            counts = np.diff(self.whole.atoms_ptr)
            order = np.argsort(counts if ascending else -counts, kind="stable")
            # What is deleted moves along, and stays deleted.
            self.parts = [self.whole.take(order)]
            self.alive = [self.alive[i] for i in order]
            self.rewrites += 1

        @rule(level=st.sampled_from(["atom", "edge", "system"]))
        def add_custom(self, level):
            whole, name = self.whole, f"custom{self.customs}"
            self.customs += 1
            values = np.arange(whole.rows(level), dtype="f4")
            self.writer.add_custom(name, values, level)
            self.parts = [whole.with_field(name, values, level)]

        @rule()
        def reopen(self):
            self.writer = StoreWriter(self.path, self.config)

        @rule()
        def hold(self):
            # A reader that stays open sees its generation until the next rewrite but one.
            self.held = (open_store(self.path), self.whole, list(self.alive), self.rewrites)

        @rule()
        def look_at_held(self):
            if self.held is None:
                return
            snapshot, whole, alive, rewrites = self.held
            if self.rewrites - rewrites > 1:
                with pytest.raises(StaleSnapshotError):
                    snapshot.read_block(slice(None))
            else:
                same(snapshot.read_block(slice(None)), whole)
            assert snapshot.samples_mask.tolist() == alive

        @invariant()
        def agrees(self):
            snapshot = open_store(self.path)
            assert snapshot.samples_mask.tolist() == self.alive
            same(snapshot.read_block(slice(None)), self.whole)
            report = verify(self.path)
            assert report.clean, report

        def teardown(self):
            shutil.rmtree(getattr(self, "folder", "/nonexistent"), ignore_errors=True)

    return Life


@pytest.mark.slow
def test_a_random_life_agrees_with_a_list(make, blocks, same):
    run_state_machine_as_test(
        machine(make, blocks, same),
        settings=settings(
            max_examples=18,
            stateful_step_count=10,
            deadline=None,
            # Shrinking a life takes minutes; the failing one is printed as it is.
            phases=(Phase.generate,),
        ),
    )
