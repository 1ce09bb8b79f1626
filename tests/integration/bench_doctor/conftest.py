"""The gateway's fixtures, for a deployment that is looked at."""

from __future__ import annotations

from tests.integration.gateway.conftest import rig
from tests.support.redis import *  # noqa: F403

__all__ = ["rig"]
