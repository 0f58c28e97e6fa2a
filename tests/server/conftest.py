"""One server for all tests that do not break it."""

from __future__ import annotations

import httpx
import pytest

from tests.server.loopback import serving, wait_for


@pytest.fixture(scope="session")
def served(tiny_artifacts, tmp_path_factory):
    with serving(tiny_artifacts, tmp_path_factory.mktemp("voices"), max_rows=640) as running:
        wait_for(lambda: httpx.get(f"{running.url}/ready", trust_env=False).status_code == 200, 60)
        yield running
