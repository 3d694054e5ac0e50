"""The block `tokenmill-tokenizer`: a job's section `tokenizer`, saved under a name."""

from __future__ import annotations

from typing import Literal

from prefect.blocks.core import Block

from blocks.mirror import DOCUMENTATION, LOGO, NO_INPUT_IN_ERRORS, mirrored, refuse_unknown_keys, settings_of
from tokenmill.job import TokenizerSpec


class TokenizerSettings(Block):
    """How text becomes token ids."""

    model_config = NO_INPUT_IN_ERRORS

    _block_type_name = "tokenmill tokenizer"
    _block_type_slug = "tokenmill-tokenizer"
    _logo_url = LOGO
    _documentation_url = DOCUMENTATION
    _description = "How text becomes token ids: `tokenizer: {block: NAME}` in a tokenmill job."
    _code_example = """
    ```python
    from blocks import TokenizerSettings

    tokenizer = TokenizerSettings.load("BLOCK_NAME")
    tokenizer.to_config().max_tokens
    ```
    """

    name: str | None = mirrored(TokenizerSpec, "name")
    max_tokens: int | None = mirrored(TokenizerSpec, "max_tokens")
    overflow: Literal["truncate", "reject", "chunk"] = mirrored(TokenizerSpec, "overflow")
    stride: int | None = mirrored(TokenizerSpec, "stride")
    truncation_side: Literal["right", "left"] | None = mirrored(TokenizerSpec, "truncation_side")
    special_tokens_in_text: Literal["text", "parse", "reject"] = mirrored(
        TokenizerSpec, "special_tokens_in_text"
    )
    add_generation_prompt: bool | None = mirrored(TokenizerSpec, "add_generation_prompt")
    prompt: str | None = mirrored(TokenizerSpec, "prompt")
    prompt_name: str | None = mirrored(TokenizerSpec, "prompt_name")

    def block_initialization(self) -> None:
        """Settings that no job could have are refused before they are saved."""
        refuse_unknown_keys(self)
        self.to_config()

    def to_config(self) -> TokenizerSpec:
        """What the engine takes.  Raises ValidationError."""
        return TokenizerSpec(**settings_of(self))
