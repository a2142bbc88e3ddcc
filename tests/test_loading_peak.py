"""A model that is quantized while it is loaded never exists in full precision: measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("bitsandbytes")

SCRIPT = """
import gc, json, sys, threading, time
import bitsandbytes, torch
from transformers import AutoModelForCausalLM
from lit_ppo.roles.quantized import loading_options

def held():  # without the pages of mapped files
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

def watch():
    while not done:
        peak[0] = max(peak[0], held())
        time.sleep(0.0005)

options = loading_options(sys.argv[2], torch.device("cpu"))
gc.collect()
done, start = False, held()
peak = [start]
thread = threading.Thread(target=watch)
thread.start()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, **options)
done = True
thread.join()
print(json.dumps([held() - start, peak[0] - start]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of memory")
@pytest.mark.parametrize("mode", ["nf4", "int8"])
def test_the_peak_of_loading_is_the_quantized_size_and_little_more(tmp_path, mode):
    shape = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8, vocab_size=2000)
    model = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16()
    model.save_pretrained(tmp_path)
    weights = sum(p.numel() for layer in model.model.layers for p in layer.parameters())
    largest = 4 * 1024 * 4096  # in float32, as it is quantized from
    size = weights / 2 if mode == "nf4" else weights
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), mode], capture_output=True, text=True, env=environment, check=True
    )
    held, peak = json.loads(ran.stdout.splitlines()[-1])
    assert held > size  # it is there
    assert peak < 1.1 * size + 2 * largest + 48 * 2**20  # constants, head and embedding, what the libraries need
    assert peak < weights * torch.bfloat16.itemsize * (0.5 if mode == "nf4" else 0.8)
