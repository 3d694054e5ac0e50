"""tokenmill: a corpus goes through a transformer model, and every row is accounted for.

From the ground up:
    errors, schemas, uris, job_file, job, keys      what is said
    batches, cut, accounting, schedule              what is decided; pure, no I/O, no torch
    storage_errors, store, web, parquet, lines,     what is read and written
    magic, texts, partitions, columns, rows
    arrow_ipc, json_rows, csv_rows, source_file,    ... row by row, file by file
    readers, corpus, splits
    special_text, removed, tokenizer, chat          what makes ids of a text
    backend, torch_backend, model_files             what computes
    settle, plan, receipts, manifest                what a job comes to, and what is done
    encoding                                        a batch of texts as token rows, as the job wants them
    stages/, groups, engine, verify                 what runs
Nothing here imports prefect. Heavy imports (torch, great_expectations) happen where they are used.
"""

from tokenmill.errors import TokenmillError
from tokenmill.job import Job

__all__ = ["Job", "TokenmillError", "__version__"]

__version__ = "0.1.0"
