"""What gateway, worker and client share: words, errors, clock, configuration, logs, metrics, gRPC plumbing."""
