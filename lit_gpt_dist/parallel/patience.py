"""Says what a rank waits for, where the others do not come. Knows nothing of what is done together."""

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

from torch.distributed import DistNetworkError, DistStoreError

from lit_gpt_dist.errors import RanksMissing
from lit_gpt_dist.runs import first_of_machine

SECONDS = 30.0


@contextmanager
def patience(
    rank: int, world_size: int, gives_up_after: float, seconds: float = SECONDS
) -> Generator[None, None, None]:
    """Around the start of a process group: after ``seconds`` one line on stderr, from the first rank of each machine.

    Args:
        gives_up_after: seconds in all.

    Raises:
        RanksMissing: the others did not come.
    """
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    remedy = f"start all {world_size}, each with its own RANK and the same MASTER_ADDR and MASTER_PORT, and see that they can reach that address"
    text = f"rank {rank} waits for the other {world_size - 1} at {place}, {gives_up_after:.0f} s in all; {remedy}"
    timer = threading.Timer(seconds, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if first_of_machine():
        timer.start()
    try:
        yield
    except (DistStoreError, DistNetworkError) as error:
        raise RanksMissing(
            f"the {world_size} ranks did not come together at {place} (waited {gives_up_after:.0f} s); {remedy}"
        ) from error
    finally:
        timer.cancel()
