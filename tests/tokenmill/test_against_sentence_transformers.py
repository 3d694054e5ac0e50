"""The engine's vectors beside those of sentence-transformers, on real texts and on every recipe."""

from __future__ import annotations

import ast
import importlib.util
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from outputs import MINILM, jsonl, published, write_files
from sentence_transformers import SentenceTransformer

from tokenmill.backend import Backend
from tokenmill.engine import run_job
from tokenmill.model_files import resolve_model
from tokenmill.testing import make_job

ODDITIES = [
    "",
    " \n\t ",
    "a" * 101,
    "word " * 5000,
    "[CLS] not really [SEP] special [MASK]",
    "İstanbul, Straße, ﬁne, ①, Å vs Å",
    "Le cœur a ses raisons que la raison ne connaît point.",
    "Съешь же ещё этих мягких французских булок",
    "שלום עולם, مرحبا بالعالم",
    "你好世界。日本語のテキスト。한국어 문장.",
    "ภาษาไทยไม่มีช่องว่าง",
    "👨‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 thumb",
    "e\u0301 a\u0308 \u200b \ufeff \u202e",
    "NaN null None NA",
    "x" * 20_000,
    "https://example.com/a?b=c&d=%20#e",
]
PACKAGES = ("fsspec", "yaml", "json", "asyncio", "email", "unittest", "pyarrow", "numpy")


def docstrings() -> Iterator[str]:
    """Docstrings of installed packages, in a fixed order, read without importing anything."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
            if "test" in str(path.relative_to(Path(spec.submodule_search_locations[0]))):
                continue
            tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = ast.get_docstring(node)
                    if text:
                        yield text


def thousand_texts() -> list[str]:
    topics = list(pydoc_data.topics.topics.values())[:12]
    chosen = [*ODDITIES, *topics]
    short = (text for text in docstrings() if len(text) < 80)
    return [*chosen, *islice(short, 1000 - len(chosen))]


def ours(folder: Path, texts: Sequence[str], backend: Backend | None = None, **sections: Any) -> np.ndarray:
    write_files(folder, {"a.jsonl": jsonl(list(texts))})
    job = make_job(
        folder, tokenizer={"special_tokens_in_text": "parse", **sections.pop("tokenizer", {})}, **sections
    )
    run_job(job, model=backend)
    rows = published(job)
    assert [row["row_ordinal"] for row in rows] == list(range(len(texts)))
    return np.array([row["embedding"] for row in rows], dtype=np.float32)


def theirs(model: Path, texts: Sequence[str], **options: Any) -> np.ndarray:
    encoder = SentenceTransformer(str(model), device="cpu", **options.pop("load", {}))
    return encoder.encode(list(texts), show_progress_bar=False, **options)


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return (left.astype(np.float64) * right).sum(axis=1) / norms


def test_a_thousand_real_texts_have_the_same_vectors(tmp_path: Path, minilm_backend: Backend) -> None:
    texts = thousand_texts()
    assert len(texts) == 1000
    left = ours(tmp_path, texts, minilm_backend, inference={"model": MINILM})
    right = theirs(resolve_model(MINILM), texts)
    assert left.shape == right.shape == (1000, 384)
    assert cosines(left, right).min() >= 0.99999
    assert np.abs(left - right).max() < 1e-5


def test_a_batched_row_equals_the_row_alone_on_the_real_model(
    tmp_path: Path, minilm_backend: Backend
) -> None:
    texts = [*ODDITIES, "short", "a somewhat longer text that pads the short one"]
    together = ours(tmp_path / "t", texts, minilm_backend, inference={"model": MINILM})
    alone = ours(
        tmp_path / "a", texts, minilm_backend, inference={"model": MINILM}, run={"max_batch_tokens": 1}
    )
    assert np.abs(together - alone).max() < 2e-6


TEXTS = [
    "one",
    "two words",
    "",
    "three short words here",
    "a " * 60,
    "été 你好 😀",
    "query: already",
    "x [SEP] y",
]

RECIPES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, normalized": {"normalize": True},
    "cls": {"pooling": "cls", "normalize": True},
    "last token": {"pooling": "last"},
    "dense": {"dense": [(24, "activation.Tanh")], "normalize": True},
    "two dense": {"dense": [(40, "linear.Identity"), (16, "activation.GELU")]},
    "lower case": {"do_lower_case": True},
    "roberta positions": {"kind": "roberta", "pooling": "cls"},
    "decoder, last token": {"kind": "qwen2", "pooling": "last", "normalize": True},
    "decoder, mean": {"kind": "qwen2"},
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_every_recipe_gives_the_same_vectors(tmp_path: Path, recipe: dict[str, Any]) -> None:
    model = make_checkpoint(tmp_path / "model", **recipe)
    left = ours(tmp_path, TEXTS, inference={"model": str(model)})
    right = theirs(model, TEXTS)
    np.testing.assert_allclose(left, right, atol=2e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_are_pooled_or_left_out_as_the_model_says(
    tmp_path: Path, pooling: str, include_prompt: bool
) -> None:
    prompts = {"query": "query: ", "document": "Represent this, please: "}
    model = make_checkpoint(
        tmp_path / "model",
        pooling=pooling,
        include_prompt=include_prompt,
        prompts=prompts,
        default_prompt="document",
    )
    inference = {"model": str(model)}
    np.testing.assert_allclose(
        ours(tmp_path / "d", TEXTS, inference=inference), theirs(model, TEXTS), atol=2e-6
    )
    named = ours(tmp_path / "n", TEXTS, inference=inference, tokenizer={"prompt_name": "query"})
    np.testing.assert_allclose(named, theirs(model, TEXTS, prompt_name="query"), atol=2e-6)
    given = ours(tmp_path / "g", TEXTS, inference=inference, tokenizer={"prompt": "Other: "})
    np.testing.assert_allclose(given, theirs(model, TEXTS, prompt="Other: "), atol=2e-6)


def test_truncated_dimensions_and_half_floats(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", normalize=True)
    inference = {"model": str(model), "dimensions": 12}
    right = theirs(model, TEXTS, load={"truncate_dim": 12})
    left = ours(tmp_path / "a", TEXTS, inference=inference)
    assert left.shape == (len(TEXTS), 12)
    assert cosines(left, right).min() > 0.999999
    half = ours(tmp_path / "b", TEXTS, inference={**inference, "dtype": "float16"})
    np.testing.assert_allclose(half, left, atol=5e-4)
