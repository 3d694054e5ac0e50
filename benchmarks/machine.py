"""What the benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers", "pyarrow", "numpy", "prefect")
INTERESTING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def describe() -> dict[str, Any]:
    """CPU, cores, memory and versions, as plain values."""
    cpu = _cpuinfo()
    flags = set(cpu.get("flags", "").split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": [flag for flag in INTERESTING_FLAGS if flag in flags],
        "memory_gib": _memory_gib(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "versions": {name: version(name) for name in PACKAGES},
    }


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor; empty where there is no /proc."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.is_file() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
