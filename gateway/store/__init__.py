"""What is kept in Redis: the key schema, the scripts, and the ports built on them."""
