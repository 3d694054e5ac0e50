"""What a job would cost: rows and tokens from a sample, seconds from a short probe of this machine.

Reads the head of a few shards, writes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tokenmill.accounting import per_second
from tokenmill.batches import pad_batch, plan_batches
from tokenmill.cut import Cut
from tokenmill.encoding import encode_rows
from tokenmill.engine import Run
from tokenmill.generation import Prompt, Sampling, never, plan_groups
from tokenmill.model_size import cache_bytes, memory_bytes, read_size
from tokenmill.plan import Plan, Shard
from tokenmill.sample import sample_rows, sample_shards
from tokenmill.settle import InferSetup

SAMPLE_ROWS = 256
PROBE_S = 2.0
WORTH_A_WORD = 1.25
PROBE_STEPS = 8


def estimate(run: Run, *, probe: bool = True) -> dict[str, Any]:
    """Shards, what is done, tokens and seconds of what is left, as plain values.

    probe: also run the model on a sample for about two seconds.  Raises ConfigError's leaves.
    """
    plan = run.plan()
    todo = run.todo(plan)
    texts, pairs, sample_bytes = _sample(run, plan)
    cut, tokenize_rate = _tokenize(run, texts, pairs)
    tokens_per_byte = int(cut.offsets_N1[-1]) / sample_bytes if sample_bytes else 0.0
    rates = _model_rates(run, cut) if probe and run.setup.infer and texts else ModelRates()
    tokenize_left, infer_left = (_tokens(shards, tokens_per_byte) for shards in (todo.tokenize, todo.infer))
    new_left = round(infer_left * _new_per_token(run, cut))
    seconds = (
        per_second(tokenize_left, tokenize_rate)
        + per_second(infer_left, rates.infer or 0.0)
        + per_second(new_left, rates.generate or 0.0)
    )
    return {
        "job": run.job.name,
        "output": run.store.uri,
        **run.setup.describe(),
        **(_checkpoint(run, run.setup.infer) if run.setup.infer else {}),
        "files": plan.num_files,
        "skipped": dict(plan.skipped),
        "text_bytes": plan.text_bytes,
        "shards": len(plan.shards),
        "shards_tokenized": len(plan.shards) - len(todo.tokenize),
        "shards_inferred": len(plan.shards) - len(todo.infer),
        "published": run.is_published(plan),
        "tokens_estimate": _tokens(plan.shards, tokens_per_byte),
        "tokens_left_estimate": infer_left,
        "share_longer_in_sample": round(_share_longer(cut), 4) if texts else 0.0,
        "tokenize_tokens_per_second": round(tokenize_rate, 1),
        "infer_tokens_per_second": round(rates.infer, 1) if rates.infer else None,
        "generate_tokens_per_second": round(rates.generate, 1) if rates.generate else None,
        "tokens_generated_at_most": new_left,
        "seconds_estimate": round(seconds),
    }


def _checkpoint(run: Run, infer: InferSetup) -> dict[str, Any]:
    """What the model is, and whether it fits where it will run.  Raises ConfigError, ModelMismatchError."""
    from tokenmill.torch_device import (
        DEFAULT_BATCH_TOKENS,
        default_cache_tokens,
        device_memory,
        pick_precision,
    )
    from tokenmill.torch_heads import LOGITS_AT_ONCE

    spec = run.job.inference
    devices = infer.devices()
    device = devices[0]
    precision = pick_precision(spec.precision, device)
    size = read_size(infer.folder)
    budget = run.job.run.max_batch_tokens or DEFAULT_BATCH_TOKENS[device.partition(":")[0]]
    held = 3 * 4 * LOGITS_AT_ONCE if spec.task == "score" else 0
    if spec.task == "generate":
        token_bytes = cache_bytes(infer.folder, precision)
        held = token_bytes * (run.job.run.max_batch_tokens or default_cache_tokens(device, token_bytes))
    needed, there = memory_bytes(size, precision, budget, held), device_memory(device)
    return {
        "architecture": size.architecture,
        "parameters": size.num_parameters,
        "stored_as": size.stored_as,
        "positions": size.positions,
        "devices": list(devices),
        "precision": precision,
        "memory_estimate_bytes": needed,
        "device_memory_bytes": there,
        "fits": needed < there,
        "faster_precision": _faster_precision(device, precision, spec.task),
    }


def _faster_precision(device: str, precision: str, task: str) -> dict[str, Any] | None:
    """The precision that this CPU computes linear layers fastest in, where it is worth a word."""
    from tokenmill.torch_device import layer_speed

    if device != "cpu" or precision != "fp32":
        return None
    speeds = {
        name: layer_speed(name, device) for name in ("bf16", "int8") if (name, task) != ("int8", "generate")
    }
    best = max(speeds, key=lambda name: speeds[name])
    return {"precision": best, "speed": round(speeds[best], 2)} if speeds[best] >= WORTH_A_WORD else None


def _tokens(shards: Sequence[Shard], tokens_per_byte: float) -> int:
    return round(sum(shard.text_bytes for shard in shards) * tokens_per_byte)


def _sample(run: Run, plan: Plan) -> tuple[list[str], list[str] | None, int]:
    """Texts spread over the corpus, their second texts, and their size in bytes."""
    batches = list(
        sample_rows(run.setup, sample_shards(plan.shards), run.storages.input, max_rows=SAMPLE_ROWS)
    )
    texts = [text for batch in batches for text in batch.texts]
    pairs = [pair for batch in batches for pair in batch.pairs or []]
    size = sum(len(text.encode("utf-8", "replace")) for text in (*texts, *pairs))
    return texts, pairs if run.job.input.pair is not None else None, size


def _share_longer(cut: Cut) -> float:
    """Of the texts that are longer than a row of tokens may be."""
    longer = cut.num_dropped_N > 0 if cut.chunks is None else np.bincount(cut.chunks.text_N) > 1
    return float(longer.mean())


def _tokenize(run: Run, texts: Sequence[str], pairs: Sequence[str] | None) -> tuple[Cut, float]:
    start = time.perf_counter()
    cut = encode_rows(run.setup.tokenize, texts, pairs).cut
    return cut, per_second(int(cut.offsets_N1[-1]), time.perf_counter() - start)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRates:
    """Tokens per second: of texts through the model, and of new ones.  None: not measured."""

    infer: float | None = None
    generate: float | None = None


def _model_rates(run: Run, cut: Cut) -> ModelRates:
    sampling = run.setup.need_model().sampling
    return (
        ModelRates(infer=_infer_rate(run, cut)) if sampling is None else _generate_rates(run, cut, sampling)
    )


def _infer_rate(run: Run, cut: Cut) -> float:
    """Tokens per second of the model over batches of the sample, after one to warm up."""
    backend = run.setup.need_model().load_backend()
    budget = run.job.run.max_batch_tokens or backend.info.default_batch_tokens
    batches = plan_batches(np.diff(cut.offsets_N1), budget)
    padded = [pad_batch(cut.ids, cut.offsets_N1, rows, backend.info.pad_id) for rows in batches]
    backend.run(*padded[0])
    tokens, start = 0, time.perf_counter()
    # Subtle: batches are sorted by length, so a probe cut short must take them from everywhere.
    for ids_BL, lengths_B in padded[:: max(1, len(padded) // 16)]:
        backend.run(ids_BL, lengths_B)
        tokens += int(lengths_B.sum())
        if time.perf_counter() - start > PROBE_S:
            break
    return per_second(tokens, time.perf_counter() - start)


def _generate_rates(run: Run, cut: Cut, sampling: Sampling) -> ModelRates:
    """Steps in which prompts enter, and those that give every row a token, each by itself."""
    setup = run.setup.need_model()
    generator = setup.load_generator()
    bounds = list(pairwise(cut.offsets_N1.tolist()))
    lengths = [stop - start for start, stop in bounds]
    group = max(plan_groups(lengths, sampling.max_new_tokens), key=len)
    prompts = [Prompt(ids=cut.ids[slice(*bounds[row])], stream=row) for row in group.tolist()]
    budget = run.job.run.max_batch_tokens or generator.info.default_batch_tokens
    tokens: Counter[str] = Counter()
    seconds: dict[str, float] = {"infer": 0.0, "generate": 0.0}
    steps = generator.generate(prompts, replace(sampling, stop_ids=frozenset()), never, budget)
    for number, step in enumerate(steps):
        kind = "generate" if step.num_computed == step.num_new else "infer"
        tokens[kind] += step.num_computed
        seconds[kind] += step.seconds
        if number >= PROBE_STEPS and sum(seconds.values()) > PROBE_S:
            break
    return ModelRates(**{kind: per_second(tokens[kind], seconds[kind]) for kind in tokens})


def _new_per_token(run: Run, cut: Cut) -> float:
    """Most new tokens of a row / tokens of a row of the sample; 0 for a job that generates none."""
    spec, num_rows, num_tokens = run.job.inference, len(cut.offsets_N1) - 1, int(cut.offsets_N1[-1])
    if spec.task != "generate" or not num_tokens:
        return 0.0
    return spec.max_new_tokens * spec.num_outputs * num_rows / num_tokens
