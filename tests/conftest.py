"""Every test starts from the same state and leaves none behind."""

from __future__ import annotations

import gc
import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads and any other load make a tiny step ten times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which Lightning already does

import numpy as np
import pytest
import torch
from hypothesis import settings

# Machines differ in speed, and a failure must come back with the same examples.
settings.register_profile("lit-ppo", deadline=None, derandomize=True)
settings.load_profile("lit-ppo")


@pytest.fixture(autouse=True)
def clean_state():
    """Seed everything; put back the default dtype and threads; leave no process group."""
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def fast_collections():
    """Every recovery from an out-of-memory collects garbage, of which imported libraries are none."""
    gc.freeze()
    yield
    gc.unfreeze()
