"""What is measured beside what. Each contender embeds the rows of a shard and keeps its vectors.

tokenmill               our embed stage: token part in, result part and receipt out
tokenmill-no-allocator  the same, with freed memory given back to the system
sentence-transformers   SentenceTransformer.encode, as its documentation shows it
plain-loop              tokenizer and model of transformers, batches of 32 in corpus order

All run in fp32 on the same device with the same threads, and are measured with the model loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.engine import Run
from tokenmill.parquet import iter_part
from tokenmill.plan import Shard
from tokenmill.readers import read_slice

Vectors = npt.NDArray[np.float32]
Contender = Callable[[Shard], Callable[[], Callable[[], Vectors]]]
"""prepare(shard) -> work() -> vectors(): only `work` is timed."""

BATCH_ROWS = 32  # the default of SentenceTransformer.encode


def texts_of(run: Run, shard: Shard) -> list[str]:
    """The shard's texts in corpus order."""
    batches = (read_slice(piece, run.job.input, run.storages.input) for piece in shard.slices)
    return [text for slices in batches for batch in slices for text in batch.texts]


def tokenmill(run: Run) -> Contender:
    backend = run.setup.need_model().load_backend()

    def vectors_of(part: str) -> Vectors:
        batches = list(iter_part(run.store, part, ["embedding"]))
        return np.concatenate([b["embedding"].flatten().to_numpy().reshape(len(b), -1) for b in batches])

    def prepare(shard: Shard) -> Callable[[], Callable[[], Vectors]]:
        def work() -> Callable[[], Vectors]:
            part = run.infer(shard, backend).part.path
            return lambda: vectors_of(part)

        return work

    return prepare


def tokenmill_no_allocator(run: Run) -> Contender:
    from tokenmill import torch_backend

    vars(torch_backend)["keep_freed_memory"] = lambda: None
    return tokenmill(run)


def sentence_transformers(run: Run) -> Contender:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(run.setup.need_model().folder), local_files_only=True)
    assert model.max_seq_length == run.setup.tokenize.max_tokens

    def prepare(shard: Shard) -> Callable[[], Callable[[], Vectors]]:
        texts = texts_of(run, shard)

        def work() -> Callable[[], Vectors]:
            vectors_ND = model.encode(texts, show_progress_bar=False)
            return lambda: np.asarray(vectors_ND, dtype=np.float32)

        return work

    return prepare


def plain_loop(run: Run) -> Contender:
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder, max_tokens = str(run.setup.need_model().folder), run.setup.tokenize.max_tokens
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model.to(device).eval()

    def embed(texts: list[str]) -> Vectors:
        batch = tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
        batch = batch.to(device)
        with torch.no_grad():
            hidden_BLD = model(**batch).last_hidden_state
        mask_BL1 = batch["attention_mask"].unsqueeze(-1).float()
        pooled_BD = (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
        vectors_BD: Vectors = torch.nn.functional.normalize(pooled_BD, dim=1).cpu().numpy()
        return vectors_BD

    def prepare(shard: Shard) -> Callable[[], Callable[[], Vectors]]:
        texts = texts_of(run, shard)

        def work() -> Callable[[], Vectors]:
            starts = range(0, len(texts), BATCH_ROWS)
            vectors = [embed(texts[start : start + BATCH_ROWS]) for start in starts]
            return lambda: np.concatenate(vectors)

        return work

    return prepare


CONTENDERS: Mapping[str, Callable[[Run], Contender]] = {
    "tokenmill": tokenmill,
    "tokenmill-no-allocator": tokenmill_no_allocator,
    "sentence-transformers": sentence_transformers,
    "plain-loop": plain_loop,
}
