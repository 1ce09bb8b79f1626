"""Finds what limits a live deployment, from its metrics: `python -m bench doctor`."""
