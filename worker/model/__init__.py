"""The model: loading its weights, the forward pass over them, and the choice of the next token."""
