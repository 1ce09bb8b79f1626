from __future__ import annotations

from tests.support.redis import *  # noqa: F403 - fixtures
