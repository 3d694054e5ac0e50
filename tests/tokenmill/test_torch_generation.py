"""Continuous batching: token by token what transformers' own loop gives, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_headed
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokenmill.errors import BackendError, ModelMismatchError
from tokenmill.generation import Completion, Prompt, Sampling, Step, never
from tokenmill.model_files import EncoderRecipe, folder_state
from tokenmill.testing import FAKE_RECIPE
from tokenmill.torch_backend import ModelSpec
from tokenmill.torch_generation import TorchGenerator, choose, load_generator

VOCAB, END = 400, 7
LENGTHS = [3, 30, 9, 1, 1, 12, 25, 40, 2, 2, 17, 5]
KINDS = ["gpt2", "llama", "qwen3", "gemma", "gemma2", "granite", "cohere"]


def prompts_of(lengths: Sequence[int], seed: int = 3) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [
        Prompt(ids=rng.integers(10, VOCAB, length).astype(np.int32), stream=number)
        for number, length in enumerate(lengths)
    ]


def load(folder: Path, recipe: EncoderRecipe = FAKE_RECIPE) -> TorchGenerator:
    return load_generator(
        ModelSpec(
            folder=folder,
            state=folder_state(folder),
            task="generate",
            device="cpu",
            precision="fp32",
            recipe=recipe,
        )
    )


def make(folder: Path, kind: str, **settings: Any) -> Path:
    settings = {"vocab_size": VOCAB, "eos_token_id": END, **settings}
    return make_headed(folder, kind, AutoModelForCausalLM, **settings)


def run(
    generator: TorchGenerator, prompts: Sequence[Prompt], sampling: Sampling, budget: int = 10**6
) -> tuple[list[Completion], list[Step]]:
    steps = list(generator.generate(prompts, sampling, never, budget))
    finished = [pair for step in steps for pair in step.finished]
    assert sorted(number for number, _ in finished) == list(range(len(prompts)))
    return [completion for _, completion in sorted(finished, key=lambda pair: pair[0])], steps


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_token_by_token_what_transformers_generates_alone(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path, kind)
    prompts, model = prompts_of(LENGTHS * 2), AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.ids.astype(np.int64))[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        expected.append(tuple(out[0, len(prompt.ids) :].tolist()))
    generator = load(folder)
    for budget in (10, 130, 300, 10**6):
        made, steps = run(generator, prompts, Sampling(max_new_tokens=20, stop_ids=frozenset({END})), budget)
        assert [completion.ids for completion in made] == expected
        reasons = ["stop" if ids[-1] == END else "length" for ids in expected]
        assert [completion.finish_reason for completion in made] == reasons
        assert sum(step.num_new for step in steps) == sum(map(len, expected))


def test_a_slot_that_is_left_goes_to_the_next_prompt(tmp_path: Path) -> None:
    generator = load(make(tmp_path, "llama"))
    prompts = prompts_of([8] * 40)
    first = run(generator, prompts, Sampling(max_new_tokens=24))[0]
    stops = frozenset(completion.ids[4 + n] for n, completion in enumerate(first[:18]))
    sampling = Sampling(max_new_tokens=24, stop_ids=stops)
    made, steps = run(generator, prompts, sampling, budget=8 * 32)
    lengths = [len(completion.ids) for completion in made]
    in_turns = sum(max(lengths[start : start + 8]) for start in range(0, 40, 8))
    calls = sum(step.num_padded <= 8 for step in steps)
    assert min(lengths) < max(lengths) / 3
    assert calls < 0.8 * in_turns, (calls, in_turns)
    assert made == run(generator, prompts, sampling, budget=1)[0]


def test_samples_depend_on_their_own_stream_and_on_nothing_beside_them(tmp_path: Path) -> None:
    generator = load(make(tmp_path, "llama"))
    prompts = prompts_of(LENGTHS)
    sampling = Sampling(max_new_tokens=12, temperature=0.8, top_p=0.9, stop_ids=frozenset({END}))
    together, _ = run(generator, prompts, sampling)
    for budget in (1, 100):
        assert run(generator, prompts, sampling, budget)[0] == together
    backwards, _ = run(generator, prompts[::-1], sampling)
    assert backwards[::-1] == together
    other = [Prompt(ids=prompt.ids, stream=1000 + n) for n, prompt in enumerate(prompts)]
    assert run(generator, other, sampling)[0] != together


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (5, None), (None, 0.7), (20, 0.5), (10_000, 1.0)])
def test_tokens_are_drawn_as_transformers_weighs_them(top_k: int | None, top_p: float | None) -> None:
    logits_1K = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 3
    steps: list[Any] = [TemperatureLogitsWarper(0.7)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p else []
    shares = LogitsProcessorList(steps)(torch.zeros(1, 1, dtype=torch.long), logits_1K).softmax(dim=1)[0]
    sampling = Sampling(max_new_tokens=1, temperature=0.7, top_k=top_k, top_p=top_p)
    draws = 20_000
    uniforms = ((np.arange(draws) + 0.5) / draws).tolist()
    counts = np.bincount(choose(logits_1K.expand(draws, -1), sampling, uniforms), minlength=50)
    np.testing.assert_allclose(counts / draws, shares.numpy(), atol=2 / draws)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_that_may_be_drawn(uniform: float) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    for sampling in (
        Sampling(max_new_tokens=1, temperature=1.0),
        Sampling(max_new_tokens=1, temperature=1.0, top_p=0.99),
    ):
        assert choose(logits, sampling, [uniform])[0] in (0, 2)


def test_stop_strings_end_a_row_where_the_caller_says_so(tmp_path: Path) -> None:
    generator = load(make(tmp_path, "gpt2"))
    steps = list(
        generator.generate(prompts_of([4, 4]), Sampling(max_new_tokens=9), lambda ids: len(ids) == 3, 99)
    )
    assert [made.finish_reason for step in steps for _, made in step.finished] == ["stop", "stop"]
    assert {len(made.ids) for step in steps for _, made in step.finished} == {3}


def test_a_row_that_becomes_nan_leaves_and_harms_no_other(tmp_path: Path) -> None:
    folder = make(tmp_path, "llama")
    generator, prompts = load(folder), prompts_of([6] * 12)
    sampling = Sampling(max_new_tokens=10)
    alone = [run(generator, [prompt], sampling)[0][0] for prompt in prompts]
    poison = next(token for token in range(10) if all(token not in row.ids for row in alone))
    bad = [
        Prompt(ids=np.array([1, 2, poison, 4, 5, 6], np.int32)) if n % 3 == 0 else p
        for n, p in enumerate(prompts)
    ]
    embeddings: Any = generator._model.get_input_embeddings()
    with torch.no_grad():
        kept = embeddings.weight[poison].clone()
        embeddings.weight[poison] = torch.nan
        made, _ = run(generator, bad, sampling, budget=3 * 16)
        embeddings.weight[poison] = kept
    assert [n for n, completion in enumerate(made) if completion.finish_reason == "non_finite"] == [
        0,
        3,
        6,
        9,
    ]
    assert [made[n] for n in range(12) if n % 3] == [alone[n] for n in range(12) if n % 3]


def test_a_model_whose_state_is_more_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "rwkv", "mamba", state_size=4, num_heads=2)
    with pytest.raises(ModelMismatchError, match="cannot"):
        load(folder)


def test_an_id_beyond_the_embeddings_is_a_backend_error(tmp_path: Path) -> None:
    generator = load(make(tmp_path, "gpt2"))
    with pytest.raises(BackendError, match="model failed on"):
        list(
            generator.generate(
                [Prompt(ids=np.array([VOCAB + 5], np.int32))],
                Sampling(max_new_tokens=2),
                never,
                99,
            )
        )
