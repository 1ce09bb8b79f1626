"""What clients and workers call, and how the gateway calls workers: the only part of it that knows the wire."""
