"""Versions of the libraries that a run computes with, for its record and for bug reports."""

from importlib import metadata

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numba", "numpy")


def library_versions() -> dict[str, str]:
    """Of each, as it is installed."""
    return {name: metadata.version(name) for name in PACKAGES}
