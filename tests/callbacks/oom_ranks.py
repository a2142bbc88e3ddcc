"""One of two DDP ranks, run by test_oom.py: python oom_ranks.py RANK PORT FOLDER. Writes FOLDER/RANK.json."""

import gc
import json
import os
import sys
import warnings
from pathlib import Path

rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": str(rank),
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": port,
    "TORCHELASTIC_RUN_ID": "oom",
    "OMP_NUM_THREADS": "1",
}

from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from oom_models import (  # noqa: E402
    CNN,
    GAN,
    Cuttable,
    OutOfMemoryAt,
    Rehearsing,
    TextClassifier,
    difference,
    fit,
    images,
    plain,
    points,
    texts,
)

from lit_ppo.callbacks import OOMGuard  # noqa: E402
from lit_ppo.memory.retry import OutOfMemoryReport  # noqa: E402

results, events = {}, []


def compare(name, make, data, layer, at, on, bound, *, errors=1, unused=False, **kwargs):
    """Train undisturbed without the guard, then with it and errors on rank `on` (None: on both); compare the states."""
    runs = []
    for callbacks in ([], [Rehearsing(dry_run=name == "undisturbed"), OutOfMemoryAt(layer, at, on)]):
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
        module, _ = fit(make, data(seed=rank), *callbacks, strategy=strategy, devices=2, **kwargs)
        runs.append(module)
    if errors:
        assert callbacks[1].raised == (errors if on in (None, rank) else 0), (name, callbacks[1].calls)
        events.append(sum(callbacks[0].policy.events.values()))
    results[name] = (difference(*runs), bound)


def failure(kind, *callbacks, **kwargs):
    try:
        fit(plain, images(seed=rank), *callbacks, strategy=DDPStrategy(**kwargs), devices=2)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


warnings.simplefilter("ignore")
gc.freeze()  # every recovery collects garbage, of which imported libraries are none
double = {"precision": "64-true"}
compare("undisturbed", CNN, images, "head", {}, None, 0, errors=0, gradient_clip_val=0.1)
compare("undisturbed manual", GAN, points, "critic", {}, None, 0, errors=0, unused=True)
compare("undisturbed text", TextClassifier, texts, "model.classifier", {}, None, 0, errors=0)
compare("undisturbed accumulation", CNN, images, "head", {}, None, 0, errors=0, accumulate_grad_batches=2)
compare("forward, one rank, uncut", CNN, images, "head", {"forward": {1}}, 1, 0)
compare("backward, one rank, uncut", CNN, images, "head", {"backward": {1}}, 0, 0)
compare("clipping, one rank", CNN, images, "head", {"clip": {1}}, 1, 0, gradient_clip_val=0.1)
compare("forward, one rank", plain, images, "head", {"forward": {1}}, 1, 1e-9, **double)
compare("backward, both ranks", plain, images, "head", {"backward": {0}}, None, 1e-9, **double)
compare("text", TextClassifier, texts, "model.classifier", {"backward": {1}}, 1, 1e-8, **double)
compare("accumulation", plain, images, "head", {"backward": {1}}, 1, 1e-9, accumulate_grad_batches=3, **double)
compare("manual", Cuttable, points, "critic", {"backward": {1}}, 1, 1e-9, unused=True, **double)

results["events"] = events
results["stopped"] = failure(
    OutOfMemoryReport, OOMGuard(dry_run=False), OutOfMemoryAt("head", {"forward": set(range(99))}, 1)
)
results["refused"] = failure(MisconfigurationException, OOMGuard(), static_graph=True)
(folder / f"{rank}.json").write_text(json.dumps(results))
