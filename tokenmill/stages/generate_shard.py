"""Generation inside stage two: a window's prompts become completions, in row order. Nothing here knows torch.

Equal prompts are completed once if their next tokens are not drawn. Legend: N rows of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from tokenmill.batches import find_uniques
from tokenmill.errors import OutOfMemoryError
from tokenmill.generation import (
    MAX_ROWS,
    Completion,
    Detokenizer,
    Generator,
    Prompt,
    Sampling,
    Step,
    stream_number,
)
from tokenmill.progress import reporter
from tokenmill.rows import Reject
from tokenmill.schemas import generate_fields
from tokenmill.stages.infer_shard import Tally, Window, row_rejects


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """A completion to be made, and the rows of the window that it is for."""

    prompt: Prompt
    rows: tuple[int, ...]
    output: int = 0


class Generating:
    """Runs windows through a generator.  Implements `tokenmill.stages.infer_shard.Worker`.

    num_outputs: completions a row.  seed: of their random numbers.
    """

    def __init__(
        self,
        generator: Generator,
        sampling: Sampling,
        detokenizer: Detokenizer,
        *,
        max_batch_tokens: int,
        num_outputs: int = 1,
        seed: int = 0,
    ) -> None:
        self._generator, self._sampling, self._detokenizer = generator, sampling, detokenizer
        self._num_outputs, self._seed = num_outputs, seed
        self.fields = generate_fields(several=num_outputs > 1)
        self.tally = Tally(max_batch_tokens=max_batch_tokens)

    def compute(self, window: Window, schema: pa.Schema) -> tuple[pa.RecordBatch, list[Reject]]:
        """One that came out NaN or infinite is made again in float32."""
        tasks = self._tasks(window)
        made, reasons = self._run(self._generator, tasks, range(len(tasks)))
        bad = _non_finite(made)
        exact = self._generator.in_fp32() if bad else None
        if exact is not None:
            self.tally.counts.rows_recomputed += len(bad)
            again, too_large = self._run(exact, tasks, bad)
            made, reasons = {**made, **again}, {**reasons, **too_large}
        reasons = {**dict.fromkeys(_non_finite(made), "non_finite"), **reasons}
        bad_rows = {row: reason for number, reason in reasons.items() for row in tasks[number].rows}
        good = [row for row in range(len(window.columns)) if row not in bad_rows]
        kept = window.columns.take(pa.array(good, pa.int64()))
        columns = self._columns(window, tasks, made, good)
        return pa.record_batch([*kept.columns, *columns], schema=schema), row_rejects(window, bad_rows)

    def _tasks(self, window: Window) -> list[_Task]:
        bounds = window.offsets_N1.tolist()
        ids = [window.ids[start:stop] for start, stop in pairwise(bounds)]
        if self._sampling.is_greedy:
            uniques = find_uniques(window.ids, window.offsets_N1)
            rows_of: list[list[int]] = [[] for _ in uniques.first_rows_U]
            for row, unique in enumerate(uniques.unique_of_row_N.tolist()):
                rows_of[unique].append(row)
            return [_Task(prompt=Prompt(ids=ids[rows[0]]), rows=tuple(rows)) for rows in rows_of]
        files, ordinals = (window.columns[name].to_pylist() for name in ("source_file", "row_ordinal"))
        return [
            _Task(
                prompt=Prompt(
                    ids=ids[row], stream=stream_number(self._seed, files[row], ordinals[row], output)
                ),
                rows=(row,),
                output=output,
            )
            for row in range(len(ids))
            for output in range(self._num_outputs)
        ]

    def _run(
        self, generator: Generator, tasks: Sequence[_Task], chosen: Sequence[int]
    ) -> tuple[dict[int, Completion], dict[int, str]]:
        """Completions of chosen tasks, and the reason for each that does not fit.

        What is finished stays finished when memory runs out; the rest goes on under half the budget.
        """
        made: dict[int, Completion] = {}
        reasons: dict[int, str] = {}
        todo = list(chosen)
        while todo:
            try:
                for finished in self._finished(generator, tasks, todo):
                    made.update(finished)
                break
            except OutOfMemoryError:
                self.tally.counts.out_of_memory += 1
            todo = [number for number in todo if number not in made]
            longest = max(todo, key=lambda number: len(tasks[number].prompt.ids))
            room = len(tasks[longest].prompt.ids) + self._sampling.max_new_tokens
            # Subtle: the budget may allow far more rows than a generator ever takes.
            self.tally.max_batch_tokens = min(self.tally.max_batch_tokens, MAX_ROWS * room)
            if self.tally.max_batch_tokens < 2 * room:  # it ran alone already
                reasons[longest] = "out_of_memory"
                todo.remove(longest)
            else:
                self.tally.max_batch_tokens //= 2
        return made, reasons

    def _finished(
        self, generator: Generator, tasks: Sequence[_Task], todo: Sequence[int]
    ) -> Iterator[dict[int, Completion]]:
        """The tasks that each step finishes; every step is counted."""
        prompts = [tasks[number].prompt for number in todo]
        budget = self.tally.max_batch_tokens
        steps = generator.generate(prompts, self._sampling, self._detokenizer.ends, budget)
        while True:
            with self.tally.watch.timing("compute"):
                step = next(steps, None)
            if step is None:
                return
            self._count(step)
            finished = {todo[place]: completion for place, completion in step.finished}
            for number, completion in finished.items():
                self._advance(tasks[number], completion)
            yield finished

    def _count(self, step: Step) -> None:
        counts = self.tally.counts
        counts.batches += 1
        counts.tokens_computed += step.num_computed
        counts.tokens_padded += step.num_padded
        self.tally.latency_s.add(step.seconds)

    def _advance(self, task: _Task, completion: Completion) -> None:
        """Rows are done with their last output; tokens are the prompt's and the new ones."""
        num_rows = len(task.rows) if task.output == self._num_outputs - 1 else 0
        prompt = len(task.prompt.ids) * num_rows
        new = len(completion.ids) * len(task.rows)
        reporter().advance("infer", num_rows, prompt + new)

    def _columns(
        self, window: Window, tasks: Sequence[_Task], made: dict[int, Completion], good: Sequence[int]
    ) -> list[pa.Array]:
        outputs: dict[int, list[dict[str, object]]] = {row: [] for row in good}
        num_new = dict.fromkeys(good, 0)
        for number, task in enumerate(tasks):
            rows = [row for row in task.rows if row in outputs]
            if not rows:
                continue
            done = made[number]
            text = self._detokenizer.text(task.prompt.ids.tolist(), done.ids)
            for row in rows:
                num_new[row] += len(done.ids)
                outputs[row].append(
                    {"text": text, "finish_reason": done.finish_reason, "num_output_tokens": len(done.ids)}
                )
        self.tally.counts.tokens_generated += sum(num_new.values())
        lengths = window.lengths_N
        counts = [
            pa.array([int(lengths[row]) for row in good], pa.int32()),
            pa.array([num_new[row] for row in good], pa.int32()),
        ]
        if self._num_outputs > 1:
            return [pa.array([outputs[row] for row in good], self.fields[0].type), *counts]
        firsts = [outputs[row][0] for row in good]
        names = ("text", "finish_reason")
        return [*(pa.array([first[name] for first in firsts], pa.string()) for name in names), *counts]


def _non_finite(made: Mapping[int, Completion]) -> list[int]:
    return [number for number, done in made.items() if done.finish_reason == "non_finite"]
