"""A sum over one rank by NCCL, in a process of its own: `python -m lit_ppo.doctor.probe_nccl`."""

from __future__ import annotations

import torch
import torch.distributed as dist


def main() -> None:
    """Run it; raises if it fails."""
    dist.init_process_group("nccl", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if not torch.equal(x, torch.ones(4, device="cuda")):
        raise ValueError("a sum over one rank is not its own value")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
