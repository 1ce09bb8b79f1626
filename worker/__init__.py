"""The worker: runs one model, continuously batched over a paged KV cache, for any number of gateways."""
