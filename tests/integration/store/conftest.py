"""The real Redis of the store's tests."""

from tests.support.redis import *  # noqa: F403
