"""The engine: which requests are computed in which step, and what becomes of them."""
