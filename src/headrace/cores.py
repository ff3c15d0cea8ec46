"""How many cores this process may use: less than the machine has under ``taskset``, Slurm or in a container with a share of them."""

from __future__ import annotations

import math
import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available_cores(group: Path = _GROUP) -> int:
    """Cores of this process's affinity mask, or fewer when a control group (its files under ``group``) has it wait; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(_quota(group))))


def _quota(group: Path) -> float:
    """Cores' worth of time that the control group allows; 1e9 without a limit (of the system that a container sees: its own)."""
    new, old = group / "cpu.max", group / "cpu"
    try:
        if new.is_file():
            allowed, period = new.read_text(encoding="ascii").split()
        else:
            allowed = (old / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (old / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(allowed) / int(period) if int(allowed) > 0 else 1e9
    except (OSError, ValueError):  # no such file, or "max"
        return 1e9
