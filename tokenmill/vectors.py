"""Vectors of a few texts, computed as a job computes those of its rows. No files are involved.

Legend: N texts, D dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tokenmill.backend import Backend
from tokenmill.batches import pad_batch, plan_batches
from tokenmill.encoding import encode_rows
from tokenmill.settle import Setup


def embed_texts(
    setup: Setup, texts: Sequence[str], backend: Backend | None = None
) -> npt.NDArray[np.float32]:
    """One vector a text, shape (N, D), in order: same tokenizer, prompt, limit and model as the job's.

    A longer text is cut to the job's limit, whatever the job does with such rows; for a job with chat
    messages each is what a user says.
    backend: default the job's own, loaded once per process.  Raises ConfigError's leaves, BackendError.
    """
    backend = backend or setup.need_model().load_backend()
    tokenize = replace(setup.tokenize, overflow="truncate")
    if tokenize.chat is not None:
        texts = [json.dumps([{"role": "user", "content": text}]) for text in texts]
    cut = encode_rows(tokenize, texts).cut
    vectors_ND = np.empty((len(texts), backend.info.num_values), dtype=np.float32)
    budget = setup.job.run.max_batch_tokens or backend.info.default_batch_tokens
    for rows_B in plan_batches(np.diff(cut.offsets_N1), budget):
        vectors_ND[rows_B] = backend.run(*pad_batch(cut.ids, cut.offsets_N1, rows_B, backend.info.pad_id))
    return vectors_ND
