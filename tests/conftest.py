"""For all tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_token_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """No test leaves rows in the user's cache or finds another test's there."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
