"""The target side and the cache: text in, shards of hidden states out."""
