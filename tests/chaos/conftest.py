from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.cluster import Cluster
from tests.chaos.questions import Question, ask_all
from tests.chaos.traffic import Traffic
from tests.support.models import random_model, save_folder


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("chaos")
    cluster = Cluster(folder, save_folder(random_model("llama"), folder / "model"))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def questions(started: Cluster) -> list[Question]:
    return await ask_all(started.client("regular", 0))


@pytest_asyncio.fixture(loop_scope="package")
async def cluster(started: Cluster, questions: list[Question]) -> Cluster:
    """Two gateways, two workers and Redis, whole again whatever an earlier test has left."""
    await started.heal()
    return started


@pytest.fixture
def traffic(cluster: Cluster, questions: list[Question]) -> Traffic:
    return Traffic(cluster, questions, seed=secrets.randbelow(10**6))
