"""gRPC plumbing of both programs: the server, what surrounds every call, errors as rich status."""
