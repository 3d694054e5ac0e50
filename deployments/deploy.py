"""Work pools and deployments on the server that PREFECT_API_URL names: what `make deploy` runs.

Safe to run again: pools that are there stay as they are, deployments are brought up to date.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.workers.process import ProcessWorker

ROOT = Path(__file__).resolve().parent.parent
PREFECT_FILE = Path("deployments") / "prefect.yaml"

NO_SERVER = """\
error: no Prefect server is named. Start one, name it, and deploy again:

    {bin}prefect server start --background
    export PREFECT_API_URL=http://127.0.0.1:4200/api
    make deploy
"""

NEXT = """\
Next, from {root}: start a worker, run a job on it, look at it.

    {bin}prefect worker start --pool tokenmill-cpu
    {bin}prefect deployment run token-pipeline/cpu \
--param job="$({bin}python -m deployments.job deployments/example-job.yaml)"
    {bin}prefect dashboard open
"""


def deployments() -> list[Mapping[str, Any]]:
    """What prefect.yaml deploys."""
    found: list[Mapping[str, Any]] = yaml.safe_load((ROOT / PREFECT_FILE).read_text("utf-8"))["deployments"]
    return found


def create_pools() -> list[str]:
    """Create the work pools that are not there yet; a line for each pool."""
    names = sorted({deployment["work_pool"]["name"] for deployment in deployments()})
    with get_client(sync_client=True) as client:
        return [_create_pool(client, name) for name in names]


def _create_pool(client: Any, name: str) -> str:
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
        return f"work pool {name}: created"
    return f"work pool {name}: there already"


def deploy() -> subprocess.CompletedProcess[str]:
    """Send all deployments, by Prefect's own command."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    return subprocess.run(
        [*command, "--prefect-file", str(PREFECT_FILE)],
        cwd=ROOT,
        env={**os.environ, "TOKENMILL_HOME": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """0: deployed; 1: the server refused or does not answer; 2: no server is named."""
    url = get_current_settings().api.url
    if not url:
        print(NO_SERVER.format(bin=_bin()), file=sys.stderr, end="")
        return 2
    try:
        print("\n".join(create_pools()))
    except httpx.TransportError as exc:
        print(f"error: {url} does not answer: {exc}; is the server running?", file=sys.stderr)
        return 1
    done = deploy()
    if done.returncode:
        print(done.stdout, done.stderr, f"error: not deployed to {url}", sep="\n", file=sys.stderr)
        return 1
    for deployment in deployments():
        flow = deployment["entrypoint"].rpartition(".")[2].replace("_", "-")
        print(f"deployment {flow}/{deployment['name']}: on {deployment['work_pool']['name']}")
    print(NEXT.format(root=ROOT, bin=_bin()), end="")
    return 0


def _bin() -> str:
    """What goes before a command's name: nothing where this environment is active."""
    folder = Path(sys.executable).parent
    found = shutil.which("prefect")
    if found and Path(found).parent == folder:
        return ""
    return f"{os.path.relpath(folder, ROOT) if folder.is_relative_to(ROOT) else folder}/"


if __name__ == "__main__":
    sys.exit(main())
