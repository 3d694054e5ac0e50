"""Fakes for tests of the engine and of whatever is built on it: no model, no network, no device.

FakeTokenizer   words to ids by a checksum, with a start and an end token
FakeBackend     ids to vectors, row by row, the slow and obvious way; can fail on purpose
FakeGenerator   prompts to completions, one after another; can fail on purpose
make_job        a job with every default, input and output below one folder
make_run        that job, settled with the fakes
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.backend import BackendInfo
from tokenmill.engine import Run, Storages
from tokenmill.errors import BackendUnavailableError, OutOfMemoryError
from tokenmill.generation import (
    Completion,
    Detokenizer,
    Ends,
    FinishReason,
    Prompt,
    Sampling,
    Step,
    random_stream,
)
from tokenmill.job import Job
from tokenmill.model_files import EncoderRecipe
from tokenmill.settle import InferSetup, Setup, TokenizeSetup, read_sampling
from tokenmill.store import Store
from tokenmill.tokenizer import Encoded, LostChars, PairTemplate, TokenizerInfo

PAD, START, END, UNKNOWN, FIRST_WORD = range(5)
VOCAB_SIZE = 50_000
LONGEST_WORD = 100


FAKE_INFO = TokenizerInfo(
    fingerprint="fake-tokenizer",
    prefix_ids=(START,),
    suffix_ids=(END,),
    unknown_id=UNKNOWN,
    pad_id=PAD,
    vocab_size=VOCAB_SIZE,
    max_tokens=None,
    special_tokens=("<start>", "<end>"),
    pair=PairTemplate(prefix_ids=(START,), middle_ids=(END,), suffix_ids=(END,), second_type=1),
)


@dataclass(frozen=True, slots=True)
class FakeTokenizer:
    """One id per word: a checksum of it. Words of more than 100 characters are unknown.

    Example: "a b a" -> [id of a, id of b, id of a]; START and END go around it later
    """

    info: TokenizerInfo = FAKE_INFO

    def encode(self, texts: Sequence[str]) -> Encoded:
        rows = [[word_id(word) for word in text.split()] for text in texts]
        offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
        ids = np.array([i for row in rows for i in row], dtype=np.int32)
        return Encoded(ids=ids, offsets_N1=offsets)

    def decode(self, ids: Sequence[int], without_special: bool) -> str:
        """Ids as words. Example: [START, 7, 8] -> "7 8", or "<start> 7 8" """
        special = {START: "<start>", END: "<end>"}
        words = [special.get(token, str(token)) for token in ids]
        return " ".join(
            w for w, token in zip(words, ids, strict=True) if not (without_special and token in special)
        )

    def lost_chars(self, texts: Sequence[str], has_unknown_N: npt.NDArray[np.bool_]) -> LostChars:  # noqa: ARG002
        unknown = [sum(len(word) for word in text.split() if word_id(word) == UNKNOWN) for text in texts]
        return LostChars(
            removed_N=np.zeros(len(texts), dtype=np.int64), unknown_N=np.array(unknown, dtype=np.int64)
        )


def word_id(word: str) -> int:
    """The id that FakeTokenizer gives a word."""
    if len(word) > LONGEST_WORD:
        return UNKNOWN
    return FIRST_WORD + zlib.crc32(word.encode("utf-8")) % (VOCAB_SIZE - FIRST_WORD)


@dataclass(slots=True)
class FakeBackend:
    """A vector that depends on a row's ids and their order, and on nothing else, to the last bit.

    memory_tokens: more tokens than this in a batch, padding included, are out of memory.
    nan_ids: a row with one of these ids gives NaN.
    failures: how many calls fail for now, before the first that works.
    exact: what `in_fp32` gives.
    shapes: (rows, longest) of every call that worked.
    """

    dimensions: int = 8
    memory_tokens: int | None = None
    nan_ids: frozenset[int] = frozenset()
    failures: int = 0
    default_batch_tokens: int = 64
    device: str = "cpu"
    exact: FakeBackend | None = None
    shapes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            model_type="fake",
            num_parameters=0,
            device=self.device,
            precision="fp32",
            matmul="highest",
            num_values=self.dimensions,
            pad_id=PAD,
            default_batch_tokens=self.default_batch_tokens,
        )

    def run(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        starts_B: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.float32]:
        if self.failures:
            self.failures -= 1
            raise BackendUnavailableError("the fake backend is busy")
        if self.memory_tokens is not None and ids_BL.size > self.memory_tokens:
            raise OutOfMemoryError(f"{ids_BL.size} tokens, the fake device holds {self.memory_tokens}")
        rows, longest = ids_BL.shape
        self.shapes.append((rows, longest))
        vectors_BD = np.empty((rows, self.dimensions), dtype=np.float32)
        for row, length in enumerate(lengths_B.tolist()):
            assert 0 < length <= longest, f"row {row} has {length} of {longest} tokens"
            assert (ids_BL[row, length:] == PAD).all(), f"row {row} is not padded with {PAD}"
            vectors_BD[row] = self.vector(ids_BL[row, :length].tolist())
            if starts_B is not None:
                vectors_BD[row] *= 1 + starts_B[row]
        return vectors_BD

    def vector(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The vector of one row. The oracle, and the implementation."""
        if self.nan_ids.intersection(ids):
            return np.full(self.dimensions, np.nan, dtype=np.float32)
        places_L = np.arange(1, len(ids) + 1, dtype=np.float64)
        mixed_L = np.array(ids, dtype=np.float64) * places_L
        cells = [np.sin(mixed_L * (d + 1)).sum() / len(ids) for d in range(self.dimensions)]
        return np.array(cells, dtype=np.float32)

    def in_fp32(self) -> FakeBackend | None:
        return self.exact

    def device_memory_bytes(self) -> int:
        return 0


@dataclass(slots=True)
class FakeGenerator:
    """New ids that depend on a prompt and its stream alone; END comes where a checksum says so.

    memory_tokens: a budget above it is out of memory once `good_before` prompts are finished.
    nan_ids: a prompt with one of these ids gives NaN.  exact: what `in_fp32` gives.
    runs: how many prompts each call was given.
    """

    memory_tokens: int | None = None
    good_before: int = 0
    nan_ids: frozenset[int] = frozenset()
    default_batch_tokens: int = 64
    exact: FakeGenerator | None = None
    runs: list[int] = field(default_factory=list)

    @property
    def info(self) -> BackendInfo:
        return FakeBackend(default_batch_tokens=self.default_batch_tokens).info

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, ends: Ends, max_batch_tokens: int
    ) -> Iterator[Step]:
        self.runs.append(len(prompts))
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].ids))
        for done, number in enumerate(order):
            room = len(prompts[number].ids) + sampling.max_new_tokens
            held = max(max_batch_tokens, room)
            if self.memory_tokens is not None and held > self.memory_tokens and done >= self.good_before:
                raise OutOfMemoryError(f"{held} tokens, the fake device holds {self.memory_tokens}")
            made = self.completion(prompts[number], sampling, ends)
            size = len(prompts[number].ids) + max(0, len(made.ids) - 1)
            yield Step(
                seconds=0.001,
                num_computed=size,
                num_padded=size,
                num_new=len(made.ids),
                finished=((number, made),),
            )

    def completion(self, prompt: Prompt, sampling: Sampling, ends: Ends) -> Completion:
        """The oracle, and the implementation."""
        if self.nan_ids.intersection(prompt.ids.tolist()):
            return Completion(ids=(), finish_reason="non_finite")
        random = None if sampling.is_greedy else random_stream(prompt.stream or 0)
        new: list[int] = []
        reason: FinishReason | None = None
        while reason is None:
            drawn = 0 if random is None else int(random.integers(1000))
            number = zlib.crc32(f"{prompt.ids.tolist()} {new} {drawn}".encode())
            new.append(END if number % 7 == 0 else FIRST_WORD + number % 90)
            if new[-1] in sampling.stop_ids or ends(new):
                reason = "stop"
            elif len(new) >= sampling.max_new_tokens:
                reason = "length"
        return Completion(ids=tuple(new), finish_reason=reason)

    def in_fp32(self) -> FakeGenerator | None:
        return self.exact

    def device_memory_bytes(self) -> int:
        return 0


def make_job(folder: Path, **overrides: Any) -> Job:
    """A job that reads folder/in and writes folder/out; sections are merged key by key.

    Example: make_job(tmp_path, input={"text": "body"}, run={"workers": 1})
    """
    sections: dict[str, Any] = {
        "name": "test-job",
        "input": {"uri": str(folder / "in")},
        "inference": {"model": "fake-model"},
        "output": {"uri": str(folder / "out")},
    }
    for name, value in overrides.items():
        known = sections.get(name)
        merge = isinstance(known, dict) and isinstance(value, Mapping)
        sections[name] = {**known, **value} if merge and known else value
    return Job.parse(sections)


FAKE_RECIPE = EncoderRecipe(
    pooling="mean",
    normalize=False,
    dense=(),
    pools_prompt=True,
    max_tokens=None,
    lower_case=False,
    prompts=(),
    default_prompt=None,
)


def make_run(job: Job, tokenizer: FakeTokenizer | None = None) -> Run:
    """A job settled with a fake tokenizer, 256 tokens a row by default, and no checkpoint.

    Give a FakeBackend to `Run.infer` or to `engine.finish`.
    """
    tokenizer = tokenizer or FakeTokenizer()
    spec = job.tokenizer
    tokenize = TokenizeSetup(
        tokenizer=tokenizer,
        prompt=spec.prompt or "",
        num_prompt_tokens=0,
        max_tokens=spec.max_tokens or 256,
        overflow=spec.overflow,
        truncation_side=spec.truncation_side or "right",
        special_tokens_in_text=spec.special_tokens_in_text,
        model_vocab_size=VOCAB_SIZE,
        stride=spec.stride or 0,
    )
    no_folder = Path("/tokenmill-fake-model")
    infer = InferSetup(
        folder=no_folder,
        recipe=FAKE_RECIPE,
        job=job,
        num_prompt_tokens=0,
        pad_id=PAD,
        sampling=read_sampling(job, frozenset({END})),
        detokenizer=Detokenizer(tokenizer.decode, job.inference.stop),
    )
    storages = Storages.of(job)
    return Run(
        setup=Setup(job=job, tokenize=tokenize, infer=infer),
        storages=storages,
        store=Store.open(job.output.uri, storages.output),
    )
