"""Who waits, and in which order: the port of the fleet's one queue."""
