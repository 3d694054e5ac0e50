"""A real S3 server on loopback: Ceph's RADOS Gateway, from packages that are unpacked, never installed.

One monitor, one OSD in memory and one gateway, ready in about 3 s; about 140 MB of memory. The packages
(60 MB, kept in the user's cache folder) come through the machine's own apt-get; root is not needed.
The daemons die with the process that started them, and their folder goes too, even after SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

USER, KEY, SECRET = "tester", "testing", "testing"
PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
WANTED = ("ceph", "lib", "rados")  # of what these depend on; the rest is Python and tools for disks
APT = ("-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1")
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
READY_S, DOWNLOAD_S = 90.0, 200.0

CONF = """\
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms bind msgr2 = false
ms mon client mode = crc
auth cluster required = none
auth service required = none
auth client required = none
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
# Subtle: an OSD that is quicker than the monitor ends when its place cannot be updated.
osd crush update on start = false
osd class update on start = false
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 1
# A new pool takes 0.1 s, not 2 s.
paxos propose interval = 0.05
paxos min wait = 0.01
plugin dir = {lib}/ceph
erasure code dir = {lib}/ceph/erasure-code
osd class dir = {lib}/rados-classes
run dir = {run}
admin socket =
log file =
mon cluster log to file = false
log to stderr = true
err to stderr = true
mon data = {run}/mon
osd data = {run}/osd
rgw data = {run}/rgw
rgw sts key = abcdefghijklmnop
rgw s3 auth use sts = true
# The last answer counts; with sts first, all that is refused is AccessDenied.
rgw s3 auth order = local, external, sts
[client.rgw.a]
# Without tcp_nodelay each answer takes 45 ms.
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
"""


class GatewayUnavailableError(Exception):
    """This machine cannot have the packages, or cannot run what is in them. Tests skip."""


class GatewayFailedError(Exception):
    """The gateway could have run and did not; the message ends with what its daemons said."""


@contextmanager
def ceph_gateway() -> Iterator[str]:
    """The endpoint of a gateway that knows one user: USER with KEY and SECRET, who may write policies.

    Raises GatewayUnavailableError, GatewayFailedError.
    """
    root = unpacked()
    with _run_folder() as run:
        cluster = _Cluster(root=root, run=run)
        try:
            yield cluster.start()
        finally:
            cluster.stop()


def unpacked() -> Path:
    """The folder that holds Ceph, whole; made on first use.  Raises GatewayUnavailableError."""
    missing = [name for name in ("apt-get", "dpkg", "dpkg-deb", "setpriv") if shutil.which(name) is None]
    if missing:
        raise GatewayUnavailableError(f"needs a Debian-like Linux: there is no {', '.join(missing)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill" / "ceph"
    try:
        system = platform.freedesktop_os_release()
        arch = _output(("dpkg", "--print-architecture")).strip()
        root = cache / f"{system['ID']}-{system.get('VERSION_ID', 'rolling')}-{arch}"
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not root.exists():
                partial = cache / "partial"
                shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
                _unpack_into(partial / "root", _downloaded(partial))
                (partial / "root").rename(root)
                shutil.rmtree(partial)
    except OSError as exc:
        raise GatewayUnavailableError(f"{cache}: {exc}") from exc
    return root


def _downloaded(folder: Path) -> list[Path]:
    """The packages' files. The machine's own lists tell where they are; if they do not, new ones."""
    try:
        return _download(folder / "debs", APT)
    except GatewayUnavailableError:
        lists, kept = folder / "lists", folder / "kept"
        for each in (lists / "partial", kept):
            each.mkdir(parents=True)
        own = (*APT, "-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={kept}")
        _output(("apt-get", *own, "-o", "APT::Update::Error-Mode=any", "update"))
        return _download(folder / "new-debs", own)


def _download(debs: Path, options: Sequence[str]) -> list[Path]:
    plan = _output(("apt-get", *options, "install", "-s", "--no-install-recommends", *PACKAGES))
    missing = {line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")} | {*PACKAGES}
    wanted = sorted(name for name in missing if name.startswith(WANTED))
    debs.mkdir(parents=True)
    _output(("apt-get", *options, "download", *wanted), cwd=debs)
    return sorted(debs.glob("*.deb"))


def _unpack_into(root: Path, debs: Sequence[Path]) -> None:
    root.mkdir()
    for deb in debs:
        _output(("dpkg-deb", "-x", str(deb), str(root)))
    _output((str(root / "usr/bin/radosgw"), "--version"), env=_environment(root))


def _output(command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a command printed.  Raises GatewayUnavailableError with the first line of its complaint."""
    env = {**(env or os.environ), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            (*WITH_PARENT, *command), cwd=cwd, env=env, capture_output=True, text=True, timeout=DOWNLOAD_S
        )
    except subprocess.TimeoutExpired as exc:
        raise GatewayUnavailableError(f"{command[0]} took longer than {DOWNLOAD_S:.0f} s") from exc
    if done.returncode:
        complaint = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise GatewayUnavailableError(f"{command[0]}: {complaint}")
    return done.stdout


def _library(root: Path) -> Path:
    """Example: ROOT/usr/lib/x86_64-linux-gnu."""
    return next((root / "usr/lib").glob("*-linux-gnu*"))


def _environment(root: Path) -> dict[str, str]:
    libraries = [_library(root), _library(root) / "ceph", root / "usr/lib/ceph"]
    libraries += (root / "lib").glob("*-linux-gnu*")
    return {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": ":".join(map(str, libraries))}


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, also where this process is killed: a shell waits for its end."""
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-ceph-"))
    wait_and_remove = ("sh", "-c", 'read -r _; sleep 1; rm -rf "$1"', "sh", str(folder))
    with subprocess.Popen(wait_and_remove, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
            guard.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cluster:
    """A monitor, an OSD and a gateway that keep everything below `run`."""

    root: Path
    run: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> str:
        """Its endpoint, when the user can sign in.  Raises GatewayFailedError."""
        port, mon_port = _free_ports(2)
        fsid = str(uuid.uuid4())
        conf = CONF.format(fsid=fsid, mon_port=mon_port, port=port, lib=_library(self.root), run=self.run)
        (self.run / "ceph.conf").write_text(conf)
        for name in ("mon", "osd", "rgw"):
            (self.run / name).mkdir()
        monmap, osdmap = str(self.run / "monmap"), str(self.run / "osdmap")
        self._do(
            "monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", "--fsid", fsid, monmap
        )
        self._do("osdmaptool", "--createsimple", "1", osdmap)
        self._do("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--osdmap", osdmap)
        self._launch("ceph-mon", "-i", "a", "-f")
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()))
        self._launch("ceph-osd", "-i", "0", "-f")
        user = ("--uid", USER, "--display-name", USER, "--access-key", KEY, "--secret", SECRET)
        self._do("radosgw-admin", "user", "create", *user, "--caps", "user-policy=*")
        self._launch("radosgw", "-n", "client.rgw.a", "-f")
        endpoint = f"http://127.0.0.1:{port}"
        self._wait("radosgw", lambda: _answers(endpoint))
        return endpoint

    def stop(self) -> None:
        """No daemon runs any more. They keep nothing, so they are killed."""
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()

    def _do(self, tool: str, *arguments: str) -> None:
        process = self._spawn(tool, *arguments)
        try:
            self._wait(tool, lambda: process.poll() is not None)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise GatewayFailedError(f"{tool} failed\n{self._said()}")

    def _launch(self, daemon: str, *arguments: str) -> None:
        self.daemons[daemon] = self._spawn(daemon, *arguments)

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = (*WITH_PARENT, str(self.root / "usr/bin" / name), "-c", str(self.run / "ceph.conf"))
        with (self.run / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                (*command, *arguments),
                env=_environment(self.root),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + READY_S
        while not ready():
            dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if dead:
                raise GatewayFailedError(f"{', '.join(dead)} ended\n{self._said()}")
            if time.monotonic() > end:
                raise GatewayFailedError(f"{what} is not ready after {READY_S:.0f} s\n{self._said()}")
            time.sleep(0.05)

    def _said(self) -> str:
        """The last lines of every log."""
        told = []
        for path in sorted(self.run.glob("*.log")):
            lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
            told += [f"--- {path.stem}", *lines[-8:]]
        return "\n".join(told)


def _free_ports(num: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True
