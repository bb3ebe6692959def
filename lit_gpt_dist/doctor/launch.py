"""Starts ranks for a sweep through torchrun's own API, or joins those torchrun has started. Moves nothing itself."""

import os
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lit_gpt_dist.doctor.collectives import Sweep, measure_in_ranks


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def run_sweeps(sizes: dict[str, list[int]], ranks: int) -> list[Sweep]:
    """A sweep per backend on ``ranks`` new processes of this host, or on those that torchrun has started already.

    Args:
        sizes: backend → bytes of the larger buffer.
        ranks: processes to start; under torchrun its own number holds.
    """
    if under_torchrun():
        return measure_in_ranks(sizes)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"doctor-{uuid.uuid4().hex[:8]}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    return elastic_launch(config, measure_in_ranks)(sizes)[0]
