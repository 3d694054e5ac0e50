"""Prefect tasks: retries, artifacts, and one thin function around one engine call each."""
