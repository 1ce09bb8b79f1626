"""Starts a whole deployment on one machine: redis, a worker and a gateway as child processes."""
