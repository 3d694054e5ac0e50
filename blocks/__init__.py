"""Prefect blocks: settings and secrets that are saved once and named in a job.

Registered by the entry point `prefect.collections`, or by `prefect block register -m blocks`.
"""

from blocks.model_settings import ModelSettings
from blocks.storage_settings import StorageSettings
from blocks.tokenizer_settings import TokenizerSettings

__all__ = ["ModelSettings", "StorageSettings", "TokenizerSettings"]
