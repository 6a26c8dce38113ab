"""The two kinds of error that a user can mend; `cli.py` turns them into one sentence and an exit code."""


class UsageError(ValueError):
    """An argument, option, configuration key or path that the user gave is wrong (exit code 2)."""


class DataError(ValueError):
    """What was read is wrong: a broken line, a damaged shard, a cache that does not fit (exit 1)."""
