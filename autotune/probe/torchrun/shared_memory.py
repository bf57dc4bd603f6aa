"""What DeepSpeed's CPU collectives put into /dev/shm: is there room for it, and nothing of it may stay."""

from __future__ import annotations

import errno
import os

from autotune.probe.torchrun.rundir import SHARED_MEMORY

RANK_BYTES = 66 * 2**20
"""Of each rank (DeepSpeed's csrc/cpu/comm/shm.cpp: two buffers of 32 MiB and two of 1 MiB)."""


def check_room(ranks: int) -> None:
    """Refuse to begin where the buffers do not fit: DeepSpeed would go on without them, to a bus error.

    Args:
        ranks: on this node.

    Raises:
        OSError: no space is left (ENOSPC).
    """
    needed = RANK_BYTES * ranks
    found = os.statvfs(SHARED_MEMORY)
    left = found.f_bavail * found.f_frsize
    if left < needed:
        raise OSError(
            errno.ENOSPC,
            f"{SHARED_MEMORY} has {left / 2**20:.0f} MiB left, and the ranks' buffers take {needed / 2**20:.0f}: "
            "free some, or make it larger (docker run --shm-size=2g)",
        )


def unlink(rank: int) -> None:
    """Take this rank's buffer out of the folder, once its peers have mapped it: a rank that is killed could not."""
    buffer = "deepspeed_allreduce_buffer_{uid}_{MASTER_ADDR}_{MASTER_PORT}_{rank}"
    name = buffer.format(uid=os.getuid(), rank=rank, **os.environ)
    (SHARED_MEMORY / name).unlink(missing_ok=True)
