"""What is installed and works on this machine. Nothing is taken for granted: each feature is run once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch

from lit_ppo.doctor import Line
from lit_ppo.memory.ledger import GIB
from lit_ppo.speed import peak_of

GET_TORCH = "install a build of PyTorch for your driver: https://pytorch.org/get-started/locally/"
PROBE_SECONDS = 120.0
"""After which a probe that runs in its own process counts as hanging; Triton compiles for seconds."""

REQUIRED = ("torch", "lightning", "transformers", "peft", "jsonargparse")
OPTIONAL = {
    "bitsandbytes": "4- and 8-bit weights",
    "flash-attn": "attention of packed sequences where PyTorch has none",
    "nvidia-ml-py": "`gpu/busy` of `MemoryReport`",
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "datasets": "prompts from Hugging Face datasets",
}

ON_GPUS = ("flash-attn", "nvidia-ml-py")
"""Of no use elsewhere."""


def examine(folder: str = "outputs") -> list[Line]:
    """Look at everything.

    Args:
        folder: Where runs write.
    """
    lines = list(_packages())
    for name, probe in PROBES.items():
        try:
            lines += probe()
        except Exception as error:  # whatever a driver or a library raises is the finding
            lines.append(Line("warn", f"{name} failed: {_first(error)}"))
    return [*lines, *_disk(folder)]


def _packages() -> Iterator[Line]:
    versions = [f"{name} {version}" for name in REQUIRED if (version := _version(name))]
    absent = [name for name in REQUIRED if not _version(name)]
    python = ".".join(map(str, sys.version_info[:3]))
    yield Line("ok", f"Python {python}, {', '.join(versions)}")
    if absent:
        yield Line("error", f"not installed: {', '.join(absent)}", f"pip install {' '.join(absent)}")
    there = [f"{name} {_version(name)}" for name in OPTIONAL if _version(name)]
    if there:
        yield Line("ok", f"optional: {', '.join(there)}")
    for name, purpose in OPTIONAL.items():
        if not _version(name) and (name not in ON_GPUS or torch.cuda.is_available()):
            yield Line("missing", f"{name}, for {purpose}", f"pip install {name}")


def _cuda() -> Iterator[Line]:
    driver = _nvidia_smi("--query-gpu=driver_version")
    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        if not driver and not Path("/dev/nvidiactl").exists():
            yield Line("missing", "no GPU: everything runs on the CPU, which is enough for tests and tiny models")
        elif built is None:
            yield Line("error", f"the driver is {_one(driver)}, but this PyTorch is built without CUDA", GET_TORCH)
        else:
            what = f"the driver ({_one(driver)}) cannot be used by this PyTorch, built for CUDA {built}"
            yield Line("error", what, f"{GET_TORCH}; or update the driver")
        return
    yield Line("ok", f"CUDA {built}, driver {_one(driver)}, {torch.cuda.device_count()} device(s)")
    held = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        name = f"cuda:{i} {properties.name} ({properties.major}.{properties.minor})"
        what = f"{name}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        who = [row.split(", ")[1:3] for row in held if str(getattr(properties, "uuid", "-")) in row]
        others = {pid: memory for pid, memory in who if pid != str(os.getpid())}
        if free < 0.9 * total:
            by = ", ".join(f"{pid} ({memory})" for pid, memory in others.items())
            fix = f"ps -fp {','.join(others)}" if others else "nvidia-smi"  # whose they are, before anything is ended
            yield Line("warn", f"{what}, used by process {by or 'unknown'}", fix)
        else:
            yield Line("ok", what)
        if peak_of(properties.name) is None:
            yield Line("info", f"cuda:{i}: its peak rates are unknown, so `update/mfu` is not logged")


def _bf16() -> Iterator[Line]:
    for device in _devices():
        a, b = (torch.randn(64, 64, device=device) for _ in range(2))
        product = (a.bfloat16() @ b.bfloat16()).float()
        error = float((product - a @ b).abs().max() / (a @ b).abs().max())
        native = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
        if error > 0.05:
            yield Line("error", f"bf16 on {device} is off by {error:.0%}", "trainer.precision: 32-true")
        elif not native:
            yield Line(
                "warn",
                f"bf16 on {device} is emulated, which is slow: the device is older",
                "trainer.precision: 16-mixed",
            )
        else:
            yield Line("ok", f"bf16 runs on {device}")


def _quantization() -> Iterator[Line]:
    if not importlib.util.find_spec("bitsandbytes"):
        return  # said among the packages
    import bitsandbytes as bnb

    for device in _devices():
        weight = torch.randn(64, 128)
        layer = bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        layer.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
        layer = layer.to(device)
        x = torch.randn(8, 128, device=device)
        expected = x @ weight.T.to(device)
        error = float((layer(x).detach() - expected).norm() / expected.norm())
        if error < 0.2:
            yield Line("ok", f"bitsandbytes' NF4 runs on {device} (error {error:.1%})")
        else:
            what = f"bitsandbytes' NF4 on {device} is off by {error:.0%}: do not quantize here"
            yield Line("warn", what, "pip install -U bitsandbytes")


def _triton() -> Iterator[Line]:
    purpose = "the `graph` rollout engine's kernels and the fused head"
    if not torch.cuda.is_available():
        yield Line("info", f"Triton is not tried without a GPU; it is for {purpose}")
        return
    if not importlib.util.find_spec("triton"):
        yield Line("missing", f"Triton, for {purpose}", "pip install triton")
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        yield Line("warn", f"no C compiler, which Triton needs for {purpose}", "apt-get install gcc")
        return
    yield _in_a_process("lit_ppo.doctor.probe_kernels", f"Triton {_version('triton')} compiles", purpose)


def _attention() -> Iterator[Line]:
    if not torch.cuda.is_available():
        yield Line("info", "attention kernels are not tried without a GPU")
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            sdpa(q, k, k, is_causal=True, enable_gqa=True)
        yield Line("ok", "PyTorch's flash attention runs, with grouped queries")
    except RuntimeError as error:
        yield Line("warn", f"PyTorch's flash attention does not run ({_first(error)}): slower kernels are used")
    try:
        from torch.nn.attention.varlen import varlen_attn

        rows, ends = q[0].transpose(0, 1).contiguous(), torch.tensor([0, 100, 128], dtype=torch.int32, device="cuda")
        varlen_attn(rows, rows, rows, ends, ends, 100, 100)
        yield Line("ok", "attention of packed sequences runs (`varlen_attn`)")
    except (ImportError, RuntimeError, TypeError) as error:
        what = f"attention of packed sequences does not run ({_first(error)})"
        yield Line("missing", f"{what}: others are used, or batches are padded", "pip install flash-attn")


def _distributed() -> Iterator[Line]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Line("missing", "torch.distributed, for several processes", GET_TORCH)
        return
    from torch._C._distributed_c10d import HashStore

    if not dist.is_initialized():
        try:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
            try:
                dist.all_reduce(torch.ones(1))
            finally:
                dist.destroy_process_group()
            yield Line("ok", "gloo runs, for several processes on CPUs")
        except RuntimeError as error:
            what = f"gloo does not run ({_first(error)}), for several processes on CPUs"
            yield Line("warn", what, "export GLOO_SOCKET_IFNAME=lo  # or another interface of `ip address`")
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            version = ".".join(map(str, torch.cuda.nccl.version()))
            yield _in_a_process("lit_ppo.doctor.probe_nccl", f"NCCL {version} runs", "several GPUs")
        else:
            yield Line("missing", "NCCL, for several GPUs", GET_TORCH)


def _host() -> Iterator[Line]:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines() if line.endswith("kB")}
    free, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    status = "warn" if free < 4 * GIB else "ok"
    yield Line(status, f"{free / GIB:.1f} of {total / GIB:.1f} GiB of memory free, {os.cpu_count()} CPU cores")


def _disk(folder: str) -> Iterator[Line]:
    place = existing(folder)
    free = shutil.disk_usage(place).free
    what = f"{free / GIB:.1f} GiB of disk free for {folder!r}"
    if not os.access(place, os.W_OK):
        yield Line("error", f"{folder!r} cannot be written: {str(place)!r} is not yours", f"chmod u+w {place}")
    elif free < 10 * GIB:
        fix = "trainer.default_root_dir: <a larger disk>"
        yield Line("warn", f"{what}: a checkpoint of a model takes 6 to 16 bytes a trained parameter", fix)
    else:
        yield Line("ok", what)


PROBES: dict[str, Callable[[], Iterator[Line]]] = {
    "CUDA": _cuda,
    "bf16": _bf16,
    "bitsandbytes": _quantization,
    "Triton": _triton,
    "attention": _attention,
    "torch.distributed": _distributed,
    "memory": _host,
}


def existing(folder: str) -> Path:
    """Return a folder itself, or what of it there is already."""
    path = Path(folder).expanduser().absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _in_a_process(module: str, what: str, purpose: str) -> Line:
    """Run a module: what may crash or hang shall not take this process with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Line("warn", f"{what}: no answer within {PROBE_SECONDS:g} s; it is for {purpose}")
    if done.returncode == 0:
        return Line("ok", what)
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Line("warn", f"not so: {what} ({reason}); it is for {purpose}", f"{sys.executable} -m {module}")


def _nvidia_smi(query: str) -> list[str]:
    """Return the rows of a query, or none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one(rows: list[str]) -> str:
    return rows[0] if rows else "unknown"


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
