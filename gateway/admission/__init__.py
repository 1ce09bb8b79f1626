"""What a request may use of its tenant's limits."""
