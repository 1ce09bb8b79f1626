"""A worker's edge: the gRPC service that gateways call, and the announcements to them."""
