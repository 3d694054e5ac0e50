"""The demo: docstrings of the installed packages through the whole job, and proof that it worked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from flows.launch import launch
from flows.show import show_summary
from tasks.runs import open_run
from tokenmill import report
from tokenmill.demo import QUERIES, demo_job
from tokenmill.docstrings import write_corpus
from tokenmill.engine import Run
from tokenmill.job import Job
from tokenmill.neighbours import answers, self_retrieval, texts_by_id
from tokenmill.store import Store

SHOWN = 3
TEXT_WIDTH = 120
NAME_WIDTH = 44


def run_demo(max_rows: int | None, folder: Path) -> None:
    """Write the corpus, run the job, show its summary and a few real searches."""
    errors, console = Console(stderr=True), Console()
    name = "all" if max_rows is None else str(max_rows)
    corpus = folder.resolve() / f"corpus-{name}.parquet"
    job = demo_job(str(corpus), str(folder.resolve() / f"out-{name}"))
    _write(corpus, max_rows, errors)
    summary = launch("token_pipeline", job, progress=True, console=errors)
    if summary.get("nothing_to_do"):
        show_summary(summary, console)
        summary = report.summary(report.rebuild(Store.open(job.output.uri)))
    show_summary(summary, console)
    _prove(job, console)


def _write(corpus: Path, max_rows: int | None, console: Console) -> None:
    """The corpus, with a bar while source files are parsed."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading docstrings", total=max_rows)
        stats = write_corpus(corpus, max_rows, _on_rows(progress, bar))
    console.print(f"corpus: {stats.rows:,} docstrings in {corpus}", highlight=False)


def _on_rows(progress: Progress, bar: Any) -> Callable[[int], None]:
    return lambda rows: progress.update(bar, completed=rows)


def _prove(job: Job, console: Console) -> None:
    """Nearest neighbours of a few questions, and how often documents find themselves."""
    run = open_run(job)
    plan = run.plan()
    _show_answers(run, console)
    recall = self_retrieval(run, plan)
    console.print(
        f"Asked for {recall.num_queries} documents by their first sentence alone: {recall.recall:.0%} are "
        f"among the {recall.top} nearest of {recall.num_rows:,} (by chance {recall.chance:.1%}).",
        highlight=False,
    )


def _show_answers(run: Run, console: Console) -> None:
    """The docstrings nearest to each question, a line each."""
    found = answers(run, QUERIES, top=SHOWN)
    texts = texts_by_id(run, run.plan(), [near.id for many in found for near in many if near.id])
    console.print("Nearest neighbours", style="italic")
    for query, many in zip(QUERIES, found, strict=True):
        console.print(query, style="bold", highlight=False)
        for near in many:
            name = near.id or ""
            line = (
                f"  {near.score:.3f}  {name[:NAME_WIDTH]:<{NAME_WIDTH}}  {_first_words(texts.get(name, ''))}"
            )
            console.print(line, no_wrap=True, overflow="ellipsis", highlight=False, markup=False)


def _first_words(text: str) -> str:
    """The beginning of a text, without lines of rules and stars."""
    lines = (line for line in text.splitlines() if any(char.isalnum() for char in line))
    return " ".join(" ".join(lines).split())[:TEXT_WIDTH]
