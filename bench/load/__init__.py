"""Load on a gateway over gRPC: what is sent, when, what came back, and the pictures of it."""
