"""Starting a flow from the command line: here, under a server, or on a work pool."""

from __future__ import annotations

import importlib
import time
from contextlib import suppress
from typing import Any, cast

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from rich.console import Console

from flows.outcome import nothing_to_do
from flows.progress_lines import progress_style
from flows.server import has_server, prefect_server
from tasks.runs import job_data, open_run
from tokenmill import errors
from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.job import Job

POLL_S = 2.0


def launch(name: str, job: Job, *, progress: bool, console: Console) -> dict[str, Any]:
    """Run the flow `name` of `flows.name` over a job; its summary.

    A bad job is refused, and a finished one recognised, before a server is started.
    Raises the flow's own TokenmillError.
    """
    started = time.perf_counter()
    if (early := _settled_early(name, job)) is not None:
        return early
    with prefect_server() as server_s:
        if progress and server_s is not None:
            console.print(
                f"Prefect's temporary server started in {server_s:.1f} s", style="dim", highlight=False
            )
        if job.run.on == "pool":
            summary = _on_pool(name, job, console)
        else:
            with progress_style("terminal" if progress else "none"):
                flow = getattr(importlib.import_module(f"flows.{name}"), name)
                summary = summary_of(flow(job, return_state=True))
    elapsed = {"seconds_total": round(time.perf_counter() - started, 3)}
    return {**summary, **elapsed, "seconds_server_start": round(server_s or 0.0, 3)}


def _settled_early(name: str, job: Job) -> dict[str, Any] | None:
    """What needs no server: raises what is wrong with the job; a summary if there is nothing to do.

    Blocks are kept by a server, and a pool's machines see other paths: their jobs are not looked at.
    """
    named = (job.tokenizer.block, job.inference.block, job.input.storage.block, job.output.storage.block)
    if any(named) or job.run.on != "here":
        return None
    run = open_run(job)
    if name not in ("token_pipeline", "tokenize_corpus"):
        return None
    plan = run.plan()
    if name == "token_pipeline":
        run.setup.need_model()
        if not has_server() and not run.todo(plan).infer and run.is_published(plan):
            return summary_of(nothing_to_do(run, plan, announce=False))
    return None


def summary_of(state: State[Any]) -> dict[str, Any]:
    """The flow's summary and the name of its final state.  Raises what the flow raised."""
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        raise result
    return {**result, "state": state.name, "message": state.message or ""}


def _on_pool(name: str, job: Job, console: Console) -> dict[str, Any]:
    """Run a deployment of the flow and follow it until it ends."""
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    on_gpu = job.inference.device.startswith("cuda") and name in ("token_pipeline", "run_inference")
    deployment = f"{name.replace('_', '-')}/{'gpu' if on_gpu else 'cpu'}"
    here = job.model_copy(update={"run": job.run.model_copy(update={"on": "here"})})
    try:
        flow_run = cast(
            FlowRun, run_deployment(deployment, parameters={"job": dict(job_data(here))}, timeout=0)
        )
    except ObjectNotFound as exc:
        raise ConfigError(
            f"run.on: no deployment {deployment} on this server; run `make deploy` first"
        ) from exc
    console.print(f"flow run {flow_run.name} of {deployment} is scheduled", highlight=False)
    try:
        state = _final_state(flow_run)
    except KeyboardInterrupt as exc:
        raise TokenmillError(f"no longer following flow run {flow_run.name}; it goes on in its pool") from exc
    if not state.is_completed():
        message = f"flow run {flow_run.name} ended as {state.name}: {state.message}"
        raise _error_named_in(state.message or "")(message)
    return {"state": state.name, "message": state.message or "", "output": job.output.uri}


def _final_state(flow_run: FlowRun) -> State[Any]:
    """Waits for the end of a flow run; a server that is away for a while is asked again."""
    with get_client(sync_client=True) as client:
        while True:
            with suppress(httpx.TransportError):
                state = client.read_flow_run(flow_run.id).state
                if state is not None and state.is_final():
                    return state
            time.sleep(POLL_S)


def _error_named_in(message: str) -> type[TokenmillError]:
    """The class of ours that a final state's message names: it carries the exit code."""
    for word in message.replace(":", " ").split():
        kind = getattr(errors, word, None)
        if isinstance(kind, type) and issubclass(kind, TokenmillError):
            return kind
    return TokenmillError
