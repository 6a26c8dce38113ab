"""What computed the shards of a cache: kernels, versions, device, precision, and where they mix."""

from typing import Any

NOT_RECORDED = "not recorded"


def made_by(attributes: dict[str, Any]) -> dict[str, str]:
    """{"kernels", "device", "dtype", one entry a package} of a shard, from its attributes.

    Of the kernels the headline, without the error that the self-check measured on that day.
    """
    lines, versions = attributes.get("kernels"), attributes.get("versions")
    headline = str(lines[0]) if isinstance(lines, list) and lines else NOT_RECORDED
    found = {"kernels": headline.removeprefix("kernels: ").split("; ")[0]}
    for name in ("device", "dtype"):
        found[name] = str(attributes.get(name, NOT_RECORDED))
    if isinstance(versions, dict):
        found |= {str(name): str(version) for name, version in versions.items()}
    return found


class Provenance:
    """Adds up `made_by` over shards: for each name the shards of each value."""

    def __init__(self) -> None:
        self._facts: dict[int, dict[str, str]] = {}

    def add(self, shard: int, attributes: dict[str, Any]) -> None:
        self._facts[shard] = made_by(attributes)

    def shards(self) -> dict[str, dict[str, list[int]]]:
        """{name: {value: numbers of the shards that have it}}"""
        names = dict.fromkeys(name for facts in self._facts.values() for name in facts)
        table: dict[str, dict[str, list[int]]] = {name: {} for name in names}
        for shard, facts in self._facts.items():
            for name in names:
                table[name].setdefault(facts.get(name, "not installed"), []).append(shard)
        return table

    def counts(self) -> dict[str, dict[str, int]]:
        """{name: {value: how many shards have it}}"""
        return {n: {v: len(k) for v, k in values.items()} for n, values in self.shards().items()}

    def warnings(self) -> list[str]:
        """A line for each name that is not the same everywhere."""
        return [_mixed(name, v) for name, v in self.shards().items() if len(v) > 1]


def _mixed(name: str, values: dict[str, list[int]]) -> str:
    parts = (f"{value} ({ranges(numbers)})" for value, numbers in values.items())
    return f"shards were made with different {name}: {'; '.join(parts)}"


def ranges(numbers: list[int], most: int = 12) -> str:
    """`[0, 1, 2, 7]` -> `0..2, 7`; after `most` parts only how many numbers follow."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in parts[:most]]
    rest = sum(b - a + 1 for a, b in parts[most:])
    return ", ".join([*shown, f"and {rest} more"] if rest else shown)
