"""Client: start, query and control runs without executing them."""
