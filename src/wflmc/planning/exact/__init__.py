"""Planning by the exact law of a chain: its distance to the posterior, the noise that minimises it, public proxies."""
