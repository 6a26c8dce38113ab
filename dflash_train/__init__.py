"""The drafter side: shards in, a drafter out. Never loads the target to train."""
