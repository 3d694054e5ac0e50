"""prefect-aws's block AwsCredentials as storage settings, where prefect-aws is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from blocks.saved import load_block
from blocks.storage_settings import StorageSettings
from tokenmill.errors import ConfigError
from tokenmill.storage_errors import mapped

AWS_SLUG = "aws-credentials"


def load_aws_credentials(name: str, where: str) -> StorageSettings:
    """The block `aws-credentials/NAME`.  Raises ConfigError, StoreError's leaves."""
    try:
        kind = import_module("prefect_aws").AwsCredentials
    except ImportError as exc:
        raise ConfigError(
            f"{where}: {AWS_SLUG}/{name} needs the package prefect-aws; install it, or save the keys in a "
            "tokenmill-storage block"
        ) from exc
    with mapped(f"{where}: keys of {AWS_SLUG}/{name}"):
        return from_aws(load_block(kind, name, where))


def from_aws(block: Any) -> StorageSettings:
    """Keys, region and endpoint of an AwsCredentials block; a role or profile becomes its keys.

    A block without keys leaves them to the environment, as AWS's own tools do.
    """
    settings: dict[str, Any] = {
        "region": block.region_name,
        "endpoint_url": block.aws_client_parameters.endpoint_url,
    }
    if not (block.aws_access_key_id or block.profile_name or block.assume_role_arn):
        return StorageSettings(**settings)
    keys = block.get_boto3_session().get_credentials().get_frozen_credentials()
    return StorageSettings(
        key=keys.access_key, secret=keys.secret_key, session_token=keys.token or None, **settings
    )
