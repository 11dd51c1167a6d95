"""Lightning over our loader: it trains, in two gloo ranks too, and resumes in mid-epoch.

Each run is a process of its own: a trainer leaves handlers and settings behind.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

LIGHTNING = next(
    (n for n in ("lightning", "pytorch_lightning") if importlib.util.find_spec(n) is not None), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LIGHTNING is None, reason="neither lightning nor pytorch-lightning is here"),
]

SCRIPT = """
    import json, os, sys
    import torch
    import {lightning} as L
    from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset

    class Model(L.LightningModule):
        def __init__(self, out):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(()))
            self.out = out

        def training_step(self, batch, number):
            ids = batch.energy.flatten().long().tolist()
            with open(f"{{self.out}}.{{self.global_rank}}", "a") as lines:
                lines.write(json.dumps([self.current_epoch, ids]) + "\\n")
            loss = ((self.scale - batch.positions) ** 2).mean()
            self.log("loss", loss, batch_size=batch.num_graphs)
            return loss

        def on_train_batch_end(self, outputs, batch, number):
            if "save" in about and self.global_step == 4:
                self.trainer.save_checkpoint(about["save"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if __name__ == "__main__":
        about = json.loads(sys.argv[1])
        world = about["world"]
        dataset = Dataset(AtomicDataZarrReader(about["store"]), device="cpu")
        rank = int(os.environ.get("LOCAL_RANK", 0))  # set for all but the first
        loader = DataLoader(
            dataset, batch_size=4, shuffle=True, seed=1, rank=rank, world_size=world
        )
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world,
            strategy="ddp" if world > 1 else "auto",
            max_epochs=2,
            max_steps=about.get("max_steps", -1),
            default_root_dir=about["folder"],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(about["out"]), loader, ckpt_path=about.get("resume"))
        dataset.close()
"""


def run(tmp_path: Path, store: Path, name: str, **about: Any) -> list[list[Any]]:
    """Epoch and samples of every step, of each rank."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(lightning=LIGHTNING)))
    about = {"world": 1, "store": str(store), "folder": str(tmp_path), **about}
    about["out"] = str(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), json.dumps(about)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for rank in range(about["world"]):
        lines = (tmp_path / f"{name}.{rank}").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    return found


def test_it_trains_and_resumes_in_mid_epoch(tmp_path: Path, store: Path) -> None:
    (whole,) = run(tmp_path, store, "whole")
    assert [epoch for epoch, _ in whole] == [0] * 6 + [1] * 6
    for epoch in range(2):
        seen = sorted(n for e, ids in whole if e == epoch for n in ids)
        assert seen == list(range(23))
    assert whole[:6] != whole[6:]
    saved = str(tmp_path / "stop.ckpt")
    (begun,) = run(tmp_path, store, "begun", max_steps=4, save=saved)
    (rest,) = run(tmp_path, store, "rest", resume=saved)
    assert begun == whole[:4]
    assert begun + rest == whole


def test_two_ranks_see_every_sample_once(tmp_path: Path, store: Path) -> None:
    ranks = run(tmp_path, store, "ranks", world=2)
    assert len(ranks[0]) == len(ranks[1])
    for epoch in range(2):
        seen = sorted(n for rank in ranks for e, ids in rank if e == epoch for n in ids)
        assert seen == list(range(23))
