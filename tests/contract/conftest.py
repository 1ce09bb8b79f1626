"""The real Redis of contract tests."""

from tests.support.redis import *  # noqa: F403
