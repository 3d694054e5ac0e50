"""Several devices: one model each, shards to whichever is free; and what a machine's devices are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from outputs import jsonl, published, run_fake, write_files

from tokenmill import torch_device
from tokenmill.devices import DevicePool
from tokenmill.engine import Run, finish
from tokenmill.errors import BackendUnavailableError, ConfigError
from tokenmill.receipts import read_receipts
from tokenmill.settle import InferSetup
from tokenmill.testing import FakeBackend, make_job, make_run
from tokenmill.torch_device import find_devices, layer_speed, pick_precision

GPUS = ("cuda:0", "cuda:1", "cuda:2")


class BusyBackend(FakeBackend):
    """Takes its time, and notices when two threads use it at once."""

    seconds = 0.0
    uses: list[str]
    twice: list[str]

    def run(self, ids_BL, lengths_B, starts_B=None):
        self.uses.append(self.device)
        if self.uses.count(self.device) > 1:
            self.twice.append(self.device)
        time.sleep(self.seconds)
        result = super().run(ids_BL, lengths_B, starts_B)
        self.uses.remove(self.device)
        return result


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, BusyBackend]:
    """Three of them that are not there; the first is ten times slower than the others."""
    uses, twice = [], []
    backends = {}
    for device, seconds in zip(GPUS, (0.05, 0.005, 0.005), strict=True):
        backend = BusyBackend(device=device)
        backend.seconds, backend.uses, backend.twice = seconds, uses, twice
        backends[device] = backend
    monkeypatch.setattr(torch_device, "find_devices", lambda asked: GPUS if asked == "auto" else (asked,))
    monkeypatch.setattr(InferSetup, "load_backend", lambda self, device=None: backends[device or GPUS[0]])
    return backends


def many_files(folder: Path, num_files: int = 24) -> None:
    write_files(folder, {f"{n:02}.jsonl": jsonl([f"text {n}", f"{n} more of it"]) for n in range(num_files)})


def shards_of_devices(run: Run) -> Counter[str]:
    receipts = read_receipts(run.store, "infer", run.plan().keys_of("infer"))
    return Counter(str(receipt.backend["device"]) for receipt in receipts)


def test_shards_go_to_whichever_device_is_free(tmp_path: Path, gpus: dict[str, BusyBackend]) -> None:
    many_files(tmp_path)
    run = make_run(make_job(tmp_path, input={"shard_bytes": 1}))
    finish(run)
    shards = shards_of_devices(run)
    assert set(shards) == set(GPUS)
    assert shards.total() == 24
    assert shards["cuda:0"] < min(shards["cuda:1"], shards["cuda:2"])
    assert gpus["cuda:0"].twice == []
    alone = make_job(tmp_path, input={"shard_bytes": 1}, output={"uri": str(tmp_path / "alone")})
    run_fake(alone)
    assert published(run.job) == published(alone)


def test_a_job_that_names_one_device_uses_only_that(tmp_path: Path, gpus: dict[str, BusyBackend]) -> None:
    many_files(tmp_path, 6)
    run = make_run(make_job(tmp_path, input={"shard_bytes": 1}, inference={"device": "cuda:1"}))
    assert run.infer_slots() == 1
    finish(run)
    assert shards_of_devices(run) == {"cuda:1": 6}


def test_a_device_that_fails_leaves_the_work_of_the_others(
    tmp_path: Path, gpus: dict[str, BusyBackend]
) -> None:
    many_files(tmp_path)
    run = make_run(make_job(tmp_path, input={"shard_bytes": 1}))
    run.check_model(())
    gpus["cuda:2"].failures = 1
    with pytest.raises(BackendUnavailableError, match="busy"):
        finish(run)
    gpus["cuda:2"].uses.clear()  # the fake that failed does not say that it stopped
    finish(run)
    assert shards_of_devices(run).total() == 24


def test_a_device_is_lent_to_one_at_a_time() -> None:
    pool, seen = DevicePool(), []
    with pool.borrow(["a", "b"]) as first:
        with pool.borrow(["a", "b"]) as second:
            assert (first, second) == ("a", "b")
            waiting = threading.Thread(target=lambda: seen.append(borrowed(pool)))
            waiting.start()
            time.sleep(0.05)
            assert seen == []
        waiting.join(timeout=10)
        assert seen == ["b"]


def test_a_device_comes_back_from_errors() -> None:
    pool = DevicePool()
    with pytest.raises(RuntimeError, match="lost"), pool.borrow(["a", "b"]):
        raise RuntimeError("lost")
    assert borrowed(pool) == "a"


def borrowed(pool: DevicePool) -> str:
    with pool.borrow(["a", "b"]) as device:
        return device


# --- what there is ---


def machine_with(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *, mps: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("asked", "num_gpus", "mps", "devices"),
    [
        ("auto", 2, False, ("cuda:0", "cuda:1")),
        ("cuda", 2, False, ("cuda:0", "cuda:1")),
        ("cuda:1", 2, False, ("cuda:1",)),
        ("cpu", 2, False, ("cpu",)),
        ("auto", 0, True, ("mps",)),
        ("mps", 0, True, ("mps",)),
        ("auto", 0, False, ("cpu",)),
    ],
)
def test_devices_are_those_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, num_gpus: int, mps: bool, devices: tuple[str, ...]
) -> None:
    machine_with(monkeypatch, num_gpus, mps=mps)
    assert find_devices(asked) == devices


@pytest.mark.parametrize(
    ("asked", "num_gpus", "message"),
    [
        ("cuda:3", 0, r"inference\.device: cuda:3 is not there; 0 GPU\(s\) found"),
        ("cuda", 0, r"inference\.device: cuda is not there; 0 GPU\(s\) found"),
        ("cuda:2", 2, r"inference\.device: cuda:2 is not there; 2 GPU\(s\) found"),
        ("mps", 0, r"inference\.device: mps is not there"),
    ],
)
def test_a_device_that_is_not_there_is_a_mistake_in_the_job(
    monkeypatch: pytest.MonkeyPatch, asked: str, num_gpus: int, message: str
) -> None:
    machine_with(monkeypatch, num_gpus)
    with pytest.raises(ConfigError, match=message):
        find_devices(asked)


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [({}, "fp32"), ({"avx512_bf16": True}, "fp32"), ({"avx512_bf16": True, "amx_bf16": True}, "bf16")],
)
def test_auto_is_exact_on_cpus_without_a_matrix_unit(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], precision: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert pick_precision("auto", "cpu") == precision
    assert pick_precision("fp16", "cpu") == "fp16"


@pytest.mark.parametrize(("supported", "precision"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_on_gpus_that_have_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: supported)
    assert pick_precision("auto", "cuda:0") == precision


def test_int8_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match=r"inference\.precision: int8 is for CPUs; on cuda:0 use bf16"):
        pick_precision("int8", "cuda:0")


def test_the_speed_of_a_precision_is_measured_once() -> None:
    first = layer_speed("bf16", "cpu")
    assert np.isfinite(first)
    assert first > 0
    assert layer_speed("bf16", "cpu") == first
