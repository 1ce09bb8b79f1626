"""A deployment behind TLS: certificates of one authority, certificates of another, and a small real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.gateway.conftest import rig
from tests.integration.tls.certificates import Authority
from tests.support.models import random_model, save_folder
from tests.support.redis import *  # noqa: F403

__all__ = ["rig"]


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that the deployment trusts."""
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another one, which nobody trusts."""
    return Authority(tmp_path_factory.mktemp("certificates"), "theirs")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers at once, with nonsense."""
    return save_folder(random_model("llama"), tmp_path_factory.mktemp("model"))
