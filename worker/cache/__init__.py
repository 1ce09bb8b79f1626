"""The paged KV cache: who holds which block, what can be shared, and the tensors behind it."""
