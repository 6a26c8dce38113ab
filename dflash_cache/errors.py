"""Errors that a user can mend; `cli.py` turns each into one sentence and an exit code."""


class UsageError(ValueError):
    """An argument, option, configuration key or path that the user gave is wrong (exit code 2)."""


class DataError(ValueError):
    """What was read is wrong: a broken line, a damaged shard, a foreign cache (exit code 1)."""
