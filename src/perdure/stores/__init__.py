"""Where everything lives: the protocol (`base`), the stores behind it, and their SQL."""
