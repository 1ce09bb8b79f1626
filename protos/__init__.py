"""The wire: gRPC services and messages."""
