"""Continuous batching under torch: finished rows leave at once, waiting prompts take their places.

    waiting prompts, longest first -> prefill, right-padded, no mask -> slots (slot_cache)
        -> one token a row and call -> choose -> finished? -> a slot for the next prompt

Legend: R rows that run together, N rows that enter, L longest of their prompts, D width of the model,
K size of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from tokenmill.backend import BackendInfo
from tokenmill.errors import BackendError, ModelMismatchError
from tokenmill.generation import (
    MAX_ROWS,
    Completion,
    Ends,
    FinishReason,
    Generator,
    Prompt,
    Sampling,
    Step,
    never,
    plan_groups,
    random_stream,
)
from tokenmill.model_files import first_line
from tokenmill.model_size import cache_bytes
from tokenmill.slot_cache import SlotCache
from tokenmill.torch_backend import ModelSpec, backend_info, cached, fitting, load_in_fp32, place_model
from tokenmill.torch_device import (
    DEFAULT_BATCH_TOKENS,
    default_cache_tokens,
    device_errors,
    peak_device_memory,
)
from tokenmill.torch_heads import check_token_logits, output_size, token_logits

ROWS_AT_ONCE = {"cpu": 64, "mps": 64, "cuda": MAX_ROWS}
SPARE_SHARE = 4  # spare columns, so that rows are moved to the left once in so many
MIN_SPARE = 16
PROBE_LENGTHS = (3, 7)
PROBE_NEW = 5
LOGIT_TOLERANCE = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.05}


class TorchGenerator:
    """A causal language model.  Implements `tokenmill.generation.Generator`."""

    def __init__(self, model: nn.Module, info: BackendInfo, spec: ModelSpec) -> None:
        self._model, self.info, self._spec = model, info, spec
        self._in_fp32: TorchGenerator | None = None

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, ends: Ends, max_batch_tokens: int
    ) -> Iterator[Step]:
        lengths = [len(prompt.ids) for prompt in prompts]
        for group in plan_groups(lengths, sampling.max_new_tokens):
            waiting = [_Row(number=int(n), prompt=prompts[n]) for n in group]
            yield from _Batch(self._model, self.info, waiting, sampling, ends, max_batch_tokens).run()

    def in_fp32(self) -> Generator | None:
        """Loaded when first asked for, onto the same device."""
        if self.info.precision == "fp32":
            return None
        if self._in_fp32 is None:
            self._in_fp32 = load_in_fp32(_load, self._spec, self.info.device)
        return self._in_fp32

    def device_memory_bytes(self) -> int:
        return peak_device_memory(torch.device(self.info.device))


def load_generator(spec: ModelSpec) -> TorchGenerator:
    """Load a checkpoint, once per process, device and state of its files; safetensors only, no network.

    Raises ModelNotFoundError, ModelMismatchError, ConfigError, BackendUnavailableError.
    """
    return cached(_load, spec)


def _load(spec: ModelSpec) -> TorchGenerator:
    placed = place_model(spec)
    info = backend_info(placed.model, spec, placed.device, placed.precision, num_values=0)
    tokens = default_cache_tokens(str(placed.device), cache_bytes(spec.folder, placed.precision))
    generator = TorchGenerator(placed.model, replace(info, default_batch_tokens=tokens), spec)
    with fitting(spec, placed.device):
        check_generation(generator, placed.model, f"model {spec.folder}")
    return generator


@dataclass(kw_only=True, slots=True)
class _Row:
    """A prompt, and what has come of it."""

    number: int
    prompt: Prompt
    new_ids: list[int] = field(default_factory=list)
    random: np.random.Generator | None = None

    @property
    def length(self) -> int:
        """Tokens that the model has seen, or will have at its next call but the newest."""
        return len(self.prompt.ids) + max(0, len(self.new_ids) - 1)


class _Batch:
    """Rows that share one cache. Row r of `_rows` is in slot r; None: the slot is empty.

    Subtle: prompts come longest first, so one that enters is never longer than a row that is there.
    """

    def __init__(
        self,
        model: nn.Module,
        info: BackendInfo,
        waiting: Sequence[_Row],
        sampling: Sampling,
        ends: Ends,
        max_batch_tokens: int,
    ) -> None:
        self._model, self._sampling, self._ends = model, sampling, ends
        self._device = torch.device(info.device)
        self._pad_id = info.pad_id
        self._waiting = list(waiting)[::-1]  # the next one last
        room = len(waiting[0].prompt.ids) + sampling.max_new_tokens
        self._columns = room + max(MIN_SPARE, sampling.max_new_tokens // SPARE_SHARE)
        self._max_rows = min(len(waiting), ROWS_AT_ONCE[self._device.type], max(1, max_batch_tokens // room))
        self._prefill_tokens = min(DEFAULT_BATCH_TOKENS[self._device.type], max_batch_tokens)
        self._rows: list[_Row | None] = []
        self._cache: SlotCache | None = None
        self._end = 0
        self._idle = 0  # slots that were empty, summed over calls

    def run(self) -> Iterator[Step]:
        while self._waiting or any(self._rows):
            call = self._prefill if self._waiting and self._is_time_to_enter() else self._decode
            with device_errors(f"{self._max_rows} x {self._columns} tokens"), torch.inference_mode():
                step = call()
            yield step

    def _is_time_to_enter(self) -> bool:
        """Whether empty slots have cost as much as a call: then the prompts that wait enter together."""
        active = sum(row is not None for row in self._rows)
        return active == 0 or len(self._rows) < self._max_rows or self._idle >= self._max_rows

    # --- prompts enter ---

    def _prefill(self) -> Step:
        start = time.perf_counter()
        free = [place for place, row in enumerate(self._rows) if row is None]
        free += range(len(self._rows), self._max_rows)
        longest = len(self._waiting[-1].prompt.ids)
        num = min(len(free), len(self._waiting), max(1, self._prefill_tokens // longest))
        entering = [self._waiting.pop() for _ in range(num)]
        places = free[:num]
        self._rows += [None] * (max(places) + 1 - len(self._rows))
        ids_NL, lengths_N = self._padded(entering)
        cache = DynamicCache()
        mask_NL = torch.ones_like(ids_NL)
        hidden_NLD = _hidden(
            self._model, input_ids=ids_NL, attention_mask=mask_NL, cache=cache, use_cache=True
        )
        if not any(self._rows):
            self._end = longest
        if self._cache is None:
            self._cache = SlotCache(cache, self._max_rows, self._columns)
        self._cache.enter(cache, torch.tensor(places, device=self._device), lengths_N, self._end)
        last_ND = hidden_NLD[torch.arange(num, device=self._device), lengths_N - 1]
        for place, row in zip(places, entering, strict=True):
            self._rows[place] = row
        if num == len(free):
            self._idle = 0
        finished = self._append(places, token_logits(self._model, last_ND))
        return Step(
            seconds=time.perf_counter() - start,
            num_computed=int(lengths_N.sum()),
            num_padded=ids_NL.numel(),
            num_new=num,
            finished=finished,
        )

    def _padded(self, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
        """Subtle: right-padded, so that no token of a causal model looks at padding, and attention is at its
        fastest; a mask of ones says so to models that count positions by it.
        """
        lengths = [len(row.prompt.ids) for row in rows]
        ids_NL = np.full((len(rows), max(lengths)), self._pad_id, dtype=np.int64)
        for place, row in enumerate(rows):
            ids_NL[place, : lengths[place]] = row.prompt.ids
        return torch.from_numpy(ids_NL).to(self._device), torch.tensor(lengths, device=self._device)

    # --- one token a row ---

    def _decode(self) -> Step:
        start = time.perf_counter()
        assert self._cache is not None
        self._shrink()
        active = [row for row in self._rows if row is not None]
        first = self._end - max(row.length for row in active)
        if self._end == self._columns:
            self._cache.move_to_the_left(len(self._rows), first, self._end)
            self._end -= first
            first = 0
        self._cache.look(len(self._rows), first, self._end)
        ids = [row.new_ids[-1] if row else self._pad_id for row in self._rows]
        lengths = [row.length if row else 0 for row in self._rows]
        hidden_R1D = _hidden(
            self._model,
            input_ids=torch.tensor(ids, device=self._device)[:, None],
            position_ids=torch.tensor(lengths, device=self._device)[:, None],
            attention_mask=self._mask(lengths, first),
            cache=self._cache,
            use_cache=True,
        )
        self._end += 1
        self._idle += len(self._rows) - len(active)
        places = [place for place, row in enumerate(self._rows) if row is not None]
        finished = self._append(places, token_logits(self._model, hidden_R1D[places, 0]))
        return Step(
            seconds=time.perf_counter() - start,
            num_computed=len(active),
            num_padded=len(self._rows),
            num_new=len(active),
            finished=finished,
        )

    def _mask(self, lengths: Sequence[int], first: int) -> Tensor | None:
        """Which columns are a row's own, (R, seen); None if all are: attention is then at its fastest."""
        seen = self._end + 1 - first
        if min(lengths) + 1 == seen:
            return None
        columns = torch.arange(seen, device=self._device)
        starts_R1 = torch.tensor([seen - 1 - length for length in lengths], device=self._device)[:, None]
        return (columns >= starts_R1).long()

    def _shrink(self) -> None:
        """With nothing left to enter, close ranks once half of the slots are empty."""
        kept = [place for place, row in enumerate(self._rows) if row is not None]
        if self._waiting or 2 * len(kept) > len(self._rows):
            return
        assert self._cache is not None
        longest = max(row.length for row in self._rows if row)
        rows = torch.tensor(kept, device=self._device)
        self._cache.keep(rows, self._end - longest, self._end)
        self._rows = [self._rows[place] for place in kept]

    # --- what comes out ---

    def _append(self, places: Sequence[int], logits_RK: Tensor) -> tuple[tuple[int, Completion], ...]:
        """Give each row its next token; the rows that are finished with it leave."""
        rows = [cast(_Row, self._rows[place]) for place in places]
        logits_RK = logits_RK.float()
        finite = torch.isfinite(logits_RK).all(dim=1).tolist()
        chosen = choose(logits_RK, self._sampling, [self._uniform(row) for row in rows])
        finished = []
        for place, row, token, is_finite in zip(places, rows, chosen, finite, strict=True):
            if not is_finite:
                cast(SlotCache, self._cache).clear(place)
                done = Completion(ids=tuple(row.new_ids), finish_reason="non_finite")
            else:
                row.new_ids.append(token)
                if (reason := self._reason(row)) is None:
                    continue
                done = Completion(ids=tuple(row.new_ids), finish_reason=reason)
            finished.append((row.number, done))
            self._rows[place] = None
        return tuple(finished)

    def _reason(self, row: _Row) -> FinishReason | None:
        if row.new_ids[-1] in self._sampling.stop_ids or self._ends(row.new_ids):
            return "stop"
        return "length" if len(row.new_ids) >= self._sampling.max_new_tokens else None

    def _uniform(self, row: _Row) -> float:
        """The row's next random number."""
        if self._sampling.is_greedy:
            return 0.0
        if row.random is None:
            assert row.prompt.stream is not None
            row.random = random_stream(row.prompt.stream)
        return float(row.random.random())


def choose(logits_RK: Tensor, sampling: Sampling, uniform_R: Sequence[float]) -> list[int]:
    """The next token of each row: the likeliest, or by one uniform number a row.

    Temperature comes first, then top_k, then top_p, of which the token that reaches it is in.
    Source: the order and rules of transformers' logits processors.
    """
    if sampling.is_greedy:
        return cast(list[int], logits_RK.argmax(dim=1).tolist())
    kept_RK, ids_RK = _kept(logits_RK / sampling.temperature, sampling)
    exact = torch.float32 if logits_RK.device.type == "mps" else torch.float64
    shares_RK = kept_RK.to(exact).softmax(dim=1)
    if sampling.top_p is not None:
        before_RK = shares_RK.cumsum(dim=1) - shares_RK
        shares_RK = shares_RK.masked_fill(before_RK >= sampling.top_p, 0.0)
    sums_RK = shares_RK.cumsum(dim=1)
    aims_R1 = torch.tensor(uniform_R, dtype=exact, device=sums_RK.device)[:, None] * sums_RK[:, -1:]
    # Subtle: aims are below the last sum, but rounding may lift one to it.
    places_R1 = torch.searchsorted(sums_RK, aims_R1, right=True).clamp(max=sums_RK.shape[1] - 1)
    return cast(
        list[int], places_R1[:, 0].tolist() if ids_RK is None else ids_RK.gather(1, places_R1)[:, 0].tolist()
    )


def _kept(logits_RK: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Logits that may be chosen and their ids, the largest first; as they are where no order is needed."""
    if sampling.top_k is not None:
        return logits_RK.topk(min(sampling.top_k, logits_RK.shape[1]), dim=1)
    return (
        logits_RK.sort(dim=1, descending=True, stable=True)
        if sampling.top_p is not None
        else (logits_RK, None)
    )


def _hidden(model: nn.Module, **inputs: Any) -> Tensor:
    return cast(Tensor, cast(Any, model).base_model(**inputs).last_hidden_state)


def check_generation(generator: Generator, model: nn.Module, what: str) -> None:
    """Raises ModelMismatchError unless rows together, by slots, are what they are alone, without a cache.

    For models that keep more than keys and values, or that take positions in a way of their own.
    """
    info = generator.info
    check_token_logits(model, torch.device(info.device), what)
    size = output_size(model)
    prompts = [
        Prompt(ids=((np.arange(length) * 7 + length) % size).astype(np.int32)) for length in PROBE_LENGTHS
    ]
    try:
        steps = generator.generate(
            prompts, Sampling(max_new_tokens=PROBE_NEW), never, 2 * sum(PROBE_LENGTHS) * PROBE_NEW
        )
        done = {number: made.ids for step in steps for number, made in step.finished}
        good = all(_is_greedy(model, info, prompt.ids.tolist(), done[n]) for n, prompt in enumerate(prompts))
    except (BackendError, ValueError, AttributeError, TypeError) as exc:
        raise ModelMismatchError(f"{what}: cannot go on from keys and values: {first_line(exc)}") from exc
    if not good:
        raise ModelMismatchError(
            f"{what}: rows in a batch come out other than alone; it keeps more than keys and values, and "
            "cannot generate here"
        )


def _is_greedy(model: nn.Module, info: BackendInfo, prompt: list[int], new: Sequence[int]) -> bool:
    """Whether each new token is the likeliest one, nearly, of the whole row computed at once.

    Subtle: in low precision two tokens may be as likely as each other.
    """
    ids_1L = torch.tensor([[*prompt, *new]], device=torch.device(info.device))
    with torch.inference_mode():
        logits_LK = token_logits(
            model, _hidden(model, input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L))[0]
        ).float()
    before_NK = logits_LK[len(prompt) - 1 : -1]
    chosen_N = before_NK.gather(1, ids_1L[0, len(prompt) :, None])[:, 0]
    return bool((chosen_N >= before_NK.max(dim=1).values - LOGIT_TOLERANCE[info.precision]).all())
