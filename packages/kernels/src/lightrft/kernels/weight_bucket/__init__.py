"""Weight buckets: the plan, pack, unpack, hash, and the collective that moves them."""
