"""The devices of this machine: which there are, what memory they have, what they compute fast."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from tokenmill.errors import BackendError, ConfigError, OutOfMemoryError
from tokenmill.int8 import Int8Linear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32}
DEFAULT_BATCH_TOKENS = {"cpu": 2048, "mps": 16_384, "cuda": 131_072}

# Subtle: only CUDA's allocator has an exception of its own; the others raise RuntimeError.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1

PROBE_ROUNDS = 5
CACHE_SHARE = 0.25


def keep_freed_memory() -> None:
    """Let glibc reuse freed activations instead of giving them back and faulting them in again.

    Matters for batches above the default budget: docs/decisions.md, "Memory that was freed is kept".
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Raises OutOfMemoryError and BackendError for what torch raises.  what: is run, as "3 x 8 tokens"."""
    try:
        yield
    except torch.OutOfMemoryError as exc:
        torch.cuda.empty_cache()
        raise OutOfMemoryError(f"batch of {what}") from exc
    except (RuntimeError, IndexError) as exc:
        if any(words in str(exc) for words in OUT_OF_MEMORY):
            raise OutOfMemoryError(f"batch of {what}") from exc
        raise BackendError(f"model failed on {what}: {exc}") from exc


def find_devices(asked: str) -> tuple[str, ...]:
    """The devices that a job may use, one model each.

    auto: all GPUs if there are any.  cuda: all of them.  Raises ConfigError for one that is not there.
    Example: on a machine with two GPUs, "auto" -> ("cuda:0", "cuda:1"), "cuda:1" -> ("cuda:1",)
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto" and num_gpus == 0:
        return ("mps" if torch.backends.mps.is_available() else "cpu",)
    device = torch.device("cuda" if asked == "auto" else asked)
    if device.type == "cuda":
        if (device.index or 0) >= num_gpus:
            raise ConfigError(f"inference.device: {asked} is not there; {num_gpus} GPU(s) found")
        return (asked,) if device.index is not None else tuple(f"cuda:{gpu}" for gpu in range(num_gpus))
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("inference.device: mps is not there on this machine")
    return (asked,)


def pick_precision(asked: str, device: str) -> str:
    """auto: bf16 on a GPU or CPU that multiplies it in hardware of its own, else fp32.

    Raises ConfigError for int8 anywhere but on a CPU.
    """
    if asked == "int8" and device != "cpu":
        raise ConfigError(f"inference.precision: int8 is for CPUs; on {device} use bf16, or device: cpu")
    if asked != "auto":
        return asked
    return "bf16" if _has_fast_bf16(device) else "fp32"


def _has_fast_bf16(device: str) -> bool:
    """Subtle: among CPUs with avx512_bf16 but without AMX some are faster at bf16, others slower."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(False))
    return device == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16"))


def device_memory(device: str) -> int:
    """Bytes that the device has in all; of the CPU what this process may use."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[1])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit is the word "max"
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine


def peak_device_memory(device: torch.device) -> int:
    """Most bytes that torch has held on a GPU so far; 0 for any other device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def default_cache_tokens(device: str, token_bytes: int) -> int:
    """Tokens whose keys and values, of `token_bytes` each, fill CACHE_SHARE of the device's memory."""
    return max(1, int(CACHE_SHARE * device_memory(device)) // max(1, token_bytes))


@functools.cache
def layer_speed(precision: str, device: str) -> float:
    """How many times as fast as in float32 a linear layer of a model's size is; measured in well under
    a second, once per process.
    """
    layers = {name: _layer(name, device) for name in ("fp32", precision)}
    times = dict.fromkeys(layers, float("inf"))
    with torch.inference_mode():
        for _ in range(PROBE_ROUNDS):
            for name, layer in layers.items():
                inputs = torch.ones(512, 1024, dtype=DTYPES[name], device=device)
                start = time.perf_counter()
                layer(inputs).sum().item()
                times[name] = min(times[name], time.perf_counter() - start)
    return times["fp32"] / times[precision]


def _layer(precision: str, device: str) -> nn.Module:
    linear = nn.Linear(1024, 1024, device=device)
    return Int8Linear(linear.weight, linear.bias) if precision == "int8" else linear.to(DTYPES[precision])
