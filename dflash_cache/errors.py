"""Errors that a user can mend; `cli.py` turns each into one sentence and an exit code."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line, or else its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UsageError(ValueError):
    """An argument, option, configuration key or path that the user gave is wrong (exit code 2)."""


class DataError(ValueError):
    """What was read is wrong: a broken line, a damaged shard, a foreign cache (exit code 1)."""
