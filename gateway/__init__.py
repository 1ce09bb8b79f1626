"""The gateway: speaks text with clients and token ids with workers, and decides who runs next."""
