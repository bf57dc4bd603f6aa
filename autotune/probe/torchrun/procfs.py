"""What the kernel and glibc tell of memory: of one process, of its control groups, of the whole host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
_GROUPS = (
    # of one control group: the limit, what is used of it, the key of memory.stat for page cache that can be had back
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def pss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process with shared pages shared out (Pss of smaps_rollup); 0 where that is not told.

    The kernel walks the whole page table for it: a millisecond for a small process, more for large ones.
    """
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # it is gone, or the kernel has no CONFIG_PROC_PAGE_MONITOR
        found = None
    return int(found[1]) * 1024 if found else 0


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process, shared pages in full; 0 where it is gone. The kernel keeps count of it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def heap_bytes() -> int:
    """What this process has from malloc and not given back, bytes; resident memory where glibc is older than 2.33.

    Resident memory says what glibc keeps as well: it goes on growing by tens of MB for tens of steps in which the
    same tensors come and go.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return resident_bytes()
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def everyone_resident() -> dict[int, int]:
    """Process → resident bytes, of all that can be seen from here."""
    return {int(name): resident_bytes(name) for name in os.listdir("/proc") if name.isdecimal()}


def available_bytes(root: Path = Path("/")) -> int:
    """How much more memory processes here can have before the kernel ends one of them.

    The least of what the host has (MemAvailable) and of what the limit of each control group above leaves: the limit,
    less what is used, and the page cache that can be had back.

    Args:
        root: of the file system, which has /proc and /sys/fs/cgroup.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    left = [int(found[1]) * 1024] if found else []
    for folder, limit, used, reclaimable in _group_folders(root):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit here ("max"), or no files at the top
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            stat = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines())
            left.append(max(most - now + int(stat[reclaimable]), 0))
    return min(left)


def _group_folders(root: Path) -> list[tuple[Path, str, str, str]]:
    """Every control group that this process is in, the outer ones too, with the names of its files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for controller, limit, used, reclaimable in _GROUPS:
        top = root / "sys/fs/cgroup" / controller
        for line in lines:
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                own = top / path.lstrip("/")
                levels = [level for level in (own, *own.parents) if level.is_relative_to(top)]
                folders += [(level, limit, used, reclaimable) for level in levels]
    return folders
