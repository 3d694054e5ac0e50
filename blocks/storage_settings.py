"""The block `tokenmill-storage`: where a bucket is, and the keys that open it."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr, model_validator

from blocks.mirror import DOCUMENTATION, LOGO, NO_INPUT_IN_ERRORS, mirrored, refuse_unknown_keys
from tokenmill.job import StorageSpec
from tokenmill.store import StorageConfig


class StorageSettings(Block):
    """Where a bucket is, and the keys that open it. Only `to_config` reveals them."""

    model_config = NO_INPUT_IN_ERRORS

    _block_type_name = "tokenmill storage"
    _block_type_slug = "tokenmill-storage"
    _logo_url = LOGO
    _documentation_url = DOCUMENTATION
    _description = (
        "An S3 bucket's endpoint and keys: `storage: {block: NAME}` under input or output of a tokenmill job."
    )
    _code_example = """
    ```python
    from blocks import StorageSettings

    storage = StorageSettings.load("BLOCK_NAME")
    storage.to_config()
    ```
    """

    key: SecretStr | None = Field(None, description="Access key id. Default: the environment's keys.")
    secret: SecretStr | None = Field(None, description="Secret access key.")
    session_token: SecretStr | None = Field(None, description="Session token of temporary keys.")
    endpoint_url: str | None = mirrored(StorageSpec, "endpoint_url")
    region: str | None = mirrored(StorageSpec, "region")
    anon: bool = mirrored(StorageSpec, "anon")

    def block_initialization(self) -> None:
        refuse_unknown_keys(self)

    @model_validator(mode="after")
    def _keys_are_whole(self) -> StorageSettings:
        if (self.key is None) != (self.secret is None):
            raise ValueError("give key and secret, or neither")
        if self.session_token is not None and self.key is None:
            raise ValueError("a session_token needs key and secret")
        if self.anon and self.key is not None:
            raise ValueError("give keys or anon, not both")
        return self

    def to_config(self) -> StorageConfig:
        """What the engine takes: s3fs options, the secrets revealed."""
        place = StorageSpec(endpoint_url=self.endpoint_url, region=self.region, anon=self.anon)
        keys = {"key": self.key, "secret": self.secret, "token": self.session_token}
        revealed = {name: value.get_secret_value() for name, value in keys.items() if value is not None}
        return StorageConfig(options={**StorageConfig.from_spec(place).options, **revealed})
