"""The five modes of the scheduler on the same work: `python -m bench modes`."""
