"""One of two DDP ranks: python ddp_ranks.py RANK PORT FOLDER. Writes FOLDER/RANK.pt; run by test_ddp.py."""

import os
import sys
from pathlib import Path

rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": str(rank),
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": port,
    "TORCHELASTIC_RUN_ID": "test",
    "OMP_NUM_THREADS": "1",
}

import torch  # noqa: E402
from ddp_models import CASES, SIZE, Net, callbacks, shards  # noqa: E402
from lightning.pytorch import Trainer, seed_everything  # noqa: E402

results = {}
for case in CASES:
    seed_everything(0, verbose=False)
    module = Net()
    made = callbacks(case)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=made,
    )
    trainer.fit(module, shards(rank, SIZE))
    results[case] = {"record": module.record, "weights": dict(module.named_parameters()), "calls": module.calls(made)}
torch.save(results, folder / f"{rank}.pt")
