"""The block `tokenmill-model`: a job's section `inference`, saved under a name."""

from __future__ import annotations

from typing import Literal

from prefect.blocks.core import Block

from blocks.mirror import DOCUMENTATION, LOGO, NO_INPUT_IN_ERRORS, mirrored, refuse_unknown_keys, settings_of
from tokenmill.job import InferenceSpec, Precision, Task


class ModelSettings(Block):
    """Which model runs over the tokens, and what is kept of its output."""

    model_config = NO_INPUT_IN_ERRORS

    _block_type_name = "tokenmill model"
    _block_type_slug = "tokenmill-model"
    _logo_url = LOGO
    _documentation_url = DOCUMENTATION
    _description = "Which model runs, and how: `inference: {block: NAME}` in a tokenmill job."
    _code_example = """
    ```python
    from blocks import ModelSettings

    model = ModelSettings.load("BLOCK_NAME")
    model.to_config().model
    ```
    """

    task: Task = mirrored(InferenceSpec, "task")
    model: str | None = mirrored(InferenceSpec, "model")
    precision: Precision = mirrored(InferenceSpec, "precision")
    min_agreement: float = mirrored(InferenceSpec, "min_agreement")
    device: str = mirrored(InferenceSpec, "device")
    pooling: Literal["auto", "mean", "cls", "last"] = mirrored(InferenceSpec, "pooling")
    normalize: bool | None = mirrored(InferenceSpec, "normalize")
    dimensions: int | None = mirrored(InferenceSpec, "dimensions")
    dtype: Literal["float32", "float16"] = mirrored(InferenceSpec, "dtype")
    all_scores: bool = mirrored(InferenceSpec, "all_scores")
    pool_chunks: Literal["mean", "max"] = mirrored(InferenceSpec, "pool_chunks")
    threshold: float = mirrored(InferenceSpec, "threshold")
    activation: Literal["auto", "none", "sigmoid", "softmax"] = mirrored(InferenceSpec, "activation")
    max_new_tokens: int = mirrored(InferenceSpec, "max_new_tokens")
    temperature: float = mirrored(InferenceSpec, "temperature")
    top_p: float | None = mirrored(InferenceSpec, "top_p")
    top_k: int | None = mirrored(InferenceSpec, "top_k")
    seed: int = mirrored(InferenceSpec, "seed")
    num_outputs: int = mirrored(InferenceSpec, "num_outputs")
    stop: list[str] = mirrored(InferenceSpec, "stop")
    stop_ids: list[int] = mirrored(InferenceSpec, "stop_ids")
    trust_remote_code: bool = mirrored(InferenceSpec, "trust_remote_code")

    def block_initialization(self) -> None:
        """Settings that no job could have are refused before they are saved."""
        refuse_unknown_keys(self)
        self.to_config()

    def to_config(self) -> InferenceSpec:
        """What the engine takes.  Raises ValidationError."""
        return InferenceSpec(**settings_of(self))
