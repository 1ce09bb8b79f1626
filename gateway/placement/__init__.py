"""Workers as a gateway sees them, and which of them serve what; no I/O."""
