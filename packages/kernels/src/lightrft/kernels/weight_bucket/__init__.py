"""Weight buckets: plan, pack, unpack, hash, and the collectives that transfer them."""
