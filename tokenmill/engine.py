"""Running a whole job with the engine alone: plan, shards, gates, publication.

The flows do the same with each shard as a Prefect task. Both build a `Run` and use its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from tokenmill.accounting import Counts
from tokenmill.backend import Backend
from tokenmill.devices import DEVICES
from tokenmill.errors import OutputError
from tokenmill.generation import Generator
from tokenmill.job import Job
from tokenmill.limits import check_limits
from tokenmill.manifest import (
    Manifest,
    check_owner,
    claim_output,
    claimed_plan,
    plan_fingerprint,
    read_manifest,
    remembered_cuts,
)
from tokenmill.plan import (
    Plan,
    Shard,
    Todo,
    check_results_key,
    check_tokens_key,
    find_todo,
    make_plan,
)
from tokenmill.precision_gate import GATE_ROWS, Agreement, hold_against_fp32, refuse_slow_precision
from tokenmill.receipts import Receipt, Stage, read_receipts
from tokenmill.sample import sample_shards, sample_windows
from tokenmill.schedule import pipelined
from tokenmill.settle import Model, Setup, prepare
from tokenmill.stages.aggregate import Finished, collect, is_complete, publish
from tokenmill.stages.generate_shard import Generating
from tokenmill.stages.infer_shard import Inferring, Worker, infer_shard
from tokenmill.stages.tokenize_shard import tokenize_shard
from tokenmill.store import StorageConfig, Store

STALE_SCRATCH_S = 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Storages:
    """How to open the input and the output; from blocks, or from the job and the environment."""

    input: StorageConfig
    output: StorageConfig

    @classmethod
    def of(cls, job: Job) -> Storages:
        return cls(
            input=StorageConfig.from_spec(job.input.storage),
            output=StorageConfig.from_spec(job.output.storage),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A job, settled, with its storage opened. Cheap to make again in another process."""

    setup: Setup
    storages: Storages
    store: Store

    @classmethod
    def open(cls, job: Job, storages: Storages | None = None) -> Run:
        """Raises ConfigError's leaves; touches nothing."""
        storages = storages or Storages.of(job)
        store = Store.open(job.output.uri, storages.output)
        return cls(setup=prepare(job), storages=storages, store=store)

    @property
    def job(self) -> Job:
        return self.setup.job

    def plan(self) -> Plan:
        """What would run.  Raises ConfigError's leaves, OutputError; writes nothing."""
        known_cuts = remembered_cuts(self.store)
        plan = make_plan(self.setup, self.storages.input, known_cuts)
        check_owner(self.store, self.job)
        return plan

    def claimed_plan(self, expected: str | None = None) -> Plan:
        """The shards that the output was claimed for.

        expected: `plan_id` of the caller's own plan.  Raises ConfigError, OutputError.
        """
        check_owner(self.store, self.job)
        plan = claimed_plan(self.store, self.setup)
        if expected is not None and self.plan_id(plan) != expected:
            raise OutputError(
                f"output.uri: {self.store.uri} was claimed by a later run of this job, which will publish; "
                "let one run end before the next"
            )
        return plan

    def plan_id(self, plan: Plan) -> str:
        """What a plan would publish, as a hash."""
        return plan_fingerprint(plan, self.job)

    def todo(self, plan: Plan) -> Todo:
        return find_todo(plan, self.store)

    def is_published(self, plan: Plan) -> bool:
        """Whether the manifest already publishes exactly this plan, and all of it is there."""
        manifest = read_manifest(self.store)
        if manifest is None or manifest.plan != self.plan_id(plan):
            return False
        return is_complete(plan, manifest, self.store)

    def claim(self, plan: Plan) -> None:
        """Make the output this job's own; the first thing written.  Raises OutputError."""
        claim_output(self.store, self.job, plan)
        self.store.clear_scratch(STALE_SCRATCH_S)
        self.store.abort_uploads(STALE_SCRATCH_S)

    def check_model(self, shards: Sequence[Shard]) -> Agreement | None:
        """Load the model and run one row, so that what does not work is known before anything is
        written.  shards: `sample_shards` of those to be done, on which int8 is held against float32.

        Raises ConfigError's leaves, BackendError.
        """
        setup = self.setup.need_model()
        refuse_slow_precision(setup, setup.devices()[0])
        if setup.sampling is not None:
            setup.load()  # runs two prompts
            return None
        info, backend = self.setup.tokenize.tokenizer.info, setup.load_backend()
        row = [*info.prefix_ids, *info.suffix_ids] or [info.pad_id]
        backend.run(np.array([row], dtype=np.int64), np.array([len(row)], dtype=np.int64))
        if backend.info.precision != "int8":
            return None
        windows = sample_windows(self.setup, shards, self.storages.input, self.store, max_rows=GATE_ROWS)
        return hold_against_fp32(windows, backend, setup, self.job.run.max_batch_tokens)

    def tokenize(self, shard: Shard) -> Receipt:
        check_tokens_key(self.setup, shard)
        return tokenize_shard(shard, self.setup.tokenize, self.job, self.store, self.storages.input)

    def infer(self, shard: Shard, model: Model | None = None) -> Receipt:
        """model: default the job's own model on a device that is free; waits for one."""
        setup = self.setup.need_model()
        check_results_key(self.setup, shard)
        if model is None:
            with DEVICES.borrow(setup.devices()) as device:
                return self.infer(shard, setup.load(device))
        fingerprint = setup.key_options()["model"]
        return infer_shard(shard, model, self._worker(model), self.job, self.store, fingerprint)

    def _worker(self, model: Model) -> Worker:
        setup, spec = self.setup.need_model(), self.job.inference
        budget = self.job.run.max_batch_tokens or model.info.default_batch_tokens
        if setup.sampling is None:
            backend = cast(Backend, model)
            return Inferring(backend, setup.result_columns(backend.info.num_values), budget)
        assert setup.detokenizer is not None
        return Generating(
            cast(Generator, model),
            setup.sampling,
            setup.detokenizer,
            max_batch_tokens=budget,
            num_outputs=spec.num_outputs,
            seed=spec.seed,
        )

    def infer_slots(self) -> int:
        """Shards inferred at once: one a device; what could overlap inside a shard already does."""
        return len(self.setup.need_model().devices())

    def check_limits(self, plan: Plan) -> None:
        """Hold what is tokenized so far against the job's limits.  Raises RejectLimitError, QualityError."""
        left = {shard.index for shard in self.todo(plan).tokenize}
        done = [shard.tokens_key for shard in plan.shards if shard.index not in left]
        receipts = read_receipts(self.store, "tokenize", done)
        check_limits(Counts.total(receipt.counts for receipt in receipts), self.job.quality)

    def before_infer(self, plan: Plan) -> Callable[[], None] | None:
        """What comes between the stages: the limits, unless the job lets them overlap."""
        return None if self.job.run.overlap else partial(self.check_limits, plan)

    def collect(self, plan: Plan) -> Finished:
        return collect(plan, self.store)

    def publish(self, plan: Plan, finished: Finished) -> Manifest:
        return publish(plan, self.setup, self.store, finished)


def run_shards(run: Run, plan: Plan, model: Model | None = None) -> None:
    """Do every unfinished shard of both stages with threads. The first error is raised at the end
    of the shards in progress; those that finished stay finished.
    """
    todo = run.todo(plan)
    work: dict[Stage, Callable[[Shard], Receipt]] = {
        "tokenize": run.tokenize,
        "infer": partial(run.infer, model=model),
    }
    infer_slots = 1 if model else run.infer_slots()
    with ThreadPoolExecutor(run.job.run.workers + infer_slots, "tokenmill-shard") as pool:

        def submit(stage: Stage, shard: Shard) -> Future[Receipt]:
            return pool.submit(copy_context().run, work[stage], shard)

        for finished in pipelined(
            tokenize=todo.tokenize,
            infer=todo.infer,
            submit=submit,
            succeeded=lambda future: future.exception() is None,
            tokenize_slots=run.job.run.workers,
            infer_slots=infer_slots,
            before_infer=run.before_infer(plan),
        ):
            finished.future.result()


def run_job(job: Job, storages: Storages | None = None, model: Model | None = None) -> Manifest:
    """All stages of a job in this process, without Prefect and without quality gates.

    Raises every leaf of TokenmillError.
    """
    return finish(Run.open(job, storages), model)


def finish(run: Run, model: Model | None = None) -> Manifest:
    """Do what is left of a job, publication included."""
    run.setup.need_model()
    plan = run.plan()
    unfinished = run.todo(plan).infer
    if model is None and unfinished:
        run.check_model(sample_shards(unfinished))
    run.claim(plan)
    if unfinished or not run.is_published(plan):
        run_shards(run, plan, model)
        return run.publish(plan, run.collect(plan))
    manifest = read_manifest(run.store)
    assert manifest is not None
    return manifest
