"""Who computes which routed expert, from where. So far: from the mapped shards."""
