"""The command `tokenmill`. Parses arguments, calls a flow or the engine, shows what came of it.

Exit codes: 0 done; 1 failed; 2 bad job or usage; 3 done, but more rows rejected than allowed.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from tokenmill import __version__
from tokenmill.errors import TokenmillError

if TYPE_CHECKING:
    from tokenmill.job import Job
    from tokenmill.store import Store

app = typer.Typer(
    name="tokenmill",
    help="Put a corpus through a transformer model: tokenize, infer, aggregate, publish.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 failed, 2 bad job or usage, 3 done with rejects over the limit.",
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).", show_default=False)]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT", help="An output: folder, URL, or the job file that names it.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show Prefect's own log.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]
On = Annotated[str | None, typer.Option("--on", help="here or pool: overrides run.on.", show_default=False)]


@contextmanager
def guarded(as_json: bool, debug: bool) -> Iterator[None]:
    """Errors become one line and an exit code."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    except TokenmillError as exc:
        if debug:
            raise
        _fail(exc, exc.exit_code, as_json)
    except KeyboardInterrupt:
        _fail(RuntimeError("stopped; finished shards are kept, run again to go on"), 130, as_json)
    except Exception as exc:
        if debug or isinstance(exc, typer.Exit | typer.BadParameter):
            raise
        _fail(RuntimeError(f"unexpected {type(exc).__name__}: {exc}; --debug shows where"), 1, as_json)


def _on_sigterm(*_: object) -> NoReturn:
    raise SystemExit(143)


def _fail(exc: BaseException, code: int, as_json: bool) -> NoReturn:
    message = " ".join(str(exc).split())
    if as_json:
        print(json.dumps({"error": type(exc).__name__, "message": message, "exit_code": code}))
    else:
        print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _version(value: bool) -> None:
    if value:
        print(f"tokenmill {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Put a corpus through a transformer model: tokenize, infer, aggregate, publish."""


@app.command()
def run(
    job: JobFile, as_json: Json = False, verbose: Verbose = False, debug: Debug = False, on: On = None
) -> None:
    """Run all four stages. Run again after any stop: only unfinished shards are done."""
    with guarded(as_json, debug):
        _run_flow("token_pipeline", _load(job, on), as_json, verbose)


@app.command()
def tokenize(job: JobFile, as_json: Json = False, verbose: Verbose = False, debug: Debug = False) -> None:
    """Run stage one alone: the corpus becomes a token dataset."""
    with guarded(as_json, debug):
        _run_flow("tokenize_corpus", _load(job), as_json, verbose)


@app.command()
def infer(job: JobFile, as_json: Json = False, verbose: Verbose = False, debug: Debug = False) -> None:
    """Run stage two alone: tokens become results."""
    with guarded(as_json, debug):
        _run_flow("run_inference", _load(job), as_json, verbose)


@app.command()
def aggregate(job: JobFile, as_json: Json = False, verbose: Verbose = False, debug: Debug = False) -> None:
    """Run the last stages alone: finished shards become a published dataset and a report."""
    with guarded(as_json, debug):
        _run_flow("aggregate_results", _load(job), as_json, verbose)


@app.command()
def plan(
    job: JobFile,
    as_json: Json = False,
    debug: Debug = False,
    probe: Annotated[bool, typer.Option(help="Time the tokenizer and the model on a sample.")] = True,
) -> None:
    """Tell what would run, without running it: shards, tokens, time, what is done already."""
    from flows.show import show_plan
    from tokenmill.estimate import estimate

    with guarded(as_json, debug):
        quiet()
        _show(estimate(_open(_load(job)), probe=probe), show_plan, as_json)


@app.command()
def status(out: Out, as_json: Json = False, debug: Debug = False) -> None:
    """Tell how far an output is."""
    from flows.show import show_status
    from tokenmill.status import read_status

    with guarded(as_json, debug):
        _show(read_status(_store(out)).to_json(), show_status, as_json)


@app.command()
def verify(out: Out, as_json: Json = False, debug: Debug = False) -> None:
    """Recompute every checksum and sum of an output, and name what is wrong."""
    from dataclasses import asdict

    from flows.show import show_verdict
    from tokenmill.verify import verify as check

    with guarded(as_json, debug):
        verdict = check(_store(out))
        _show(asdict(verdict), show_verdict, as_json)
        if verdict.problems:
            raise typer.Exit(1)


@app.command()
def rejects(
    out: Out,
    as_json: Json = False,
    debug: Debug = False,
    export: Annotated[
        Path | None, typer.Option(help="Write all of them to a new JSON Lines file.", show_default=False)
    ] = None,
) -> None:
    """Show the rejected rows of an output by reason, or export them to mend and run again."""
    from flows.show import show_rejects
    from tokenmill.rejects import count_rejects, export_rejects

    with guarded(as_json, debug):
        store = _store(out)
        exported = {} if export is None else export_rejects(store, export, _open)
        _show({**count_rejects(store), **exported}, show_rejects, as_json)


@app.command()
def report(out: Out, as_json: Json = False, debug: Debug = False) -> None:
    """Write the report of an output anew, and print its summary."""
    from flows.show import show_summary
    from tokenmill.report import rebuild, summary

    with guarded(as_json, debug):
        _show(summary(rebuild(_store(out))), show_summary, as_json)


@app.command()
def demo(
    rows: Annotated[str, typer.Option(help="Number of rows, or all.")] = "4000",
    out: Annotated[Path, typer.Option(help="Folder for the corpus and the output.")] = Path("demo-out"),
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run the main job on real input: the docstrings of the installed Python packages."""
    from flows.demo import run_demo

    with guarded(as_json=False, debug=debug):
        quiet(verbose)
        run_demo(_row_limit(rows), out)


def _row_limit(rows: str) -> int | None:
    if rows == "all":
        return None
    if not rows.isdecimal() or int(rows) < 1:
        raise typer.BadParameter("a number from 1, or all", param_hint="--rows")
    return int(rows)


def quiet(verbose: bool = False) -> None:
    """Set the process up for a command: no telemetry, no foreign log on the console."""
    from flows.server import quiet_environment

    quiet_environment(verbose)


def _load(path: Path, on: str | None = None) -> Job:
    from tokenmill.job import Job

    job = Job.load(path)
    if on is None:
        return job
    # Subtle: only what the file itself says, so that a block beside it keeps its say.
    data = job.model_dump(exclude_unset=True)
    return Job.parse({**data, "run": {**data.get("run", {}), "on": on}}, source="--on")


def _open(job: Job) -> Any:
    from tasks.runs import open_run

    return open_run(job)


def _store(place: str) -> Store:
    """An output by its folder or URL, or by the job file that names it and how to open it."""
    from tokenmill.store import Store

    if place.endswith((".yaml", ".yml")):
        from blocks.resolve import resolve

        job, storages = resolve(_load(Path(place)))
        return Store.open(job.output.uri, storages.output)
    return Store.open(place)


def _run_flow(name: str, job: Job, as_json: bool, verbose: bool) -> None:
    quiet(verbose)
    from flows.launch import launch
    from flows.show import show_summary

    _show(launch(name, job, progress=not as_json, console=Console(stderr=True)), show_summary, as_json)


def _show(data: Any, show: Any, as_json: bool) -> None:
    """One JSON object for machines, or a page for a person, on standard output."""
    if as_json:
        print(json.dumps(data, indent=1, sort_keys=True, allow_nan=False, default=str))
    else:
        show(data, Console())


def main() -> None:
    """Entry point of the command."""
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "110")
    app()


if __name__ == "__main__":
    main()
