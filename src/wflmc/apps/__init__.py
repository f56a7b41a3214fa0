"""Applications of the core: nobody needs one of them to understand how plans are made and chains are sampled."""
