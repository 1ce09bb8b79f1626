"""Services of inference."""
