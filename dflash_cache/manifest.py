"""manifest.json: what a cache is, and in which field two of them differ."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from dflash_cache.errors import DataError
from dflash_cache.geometry import Geometry

FORMAT_VERSION = 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    `taps`: 0-based ids of the decoder layers whose outputs are stored, in order. `identity`: what
    else binds the cache (target, revision, tokenizer, chat template, corpus digest, split, ...),
    JSON values only. `target_digest`: sha256 of each file of `target/`, filled in by
    `create_cache`. `created` and `versions` are recorded, not compared.
    """

    geometry: Geometry
    taps: tuple[int, ...]
    identity: dict[str, Any]
    plan_digest: str
    target_digest: dict[str, str] = field(default_factory=dict)
    created: str = field(default_factory=_now)
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def encoding(self) -> str:
        return self.geometry.encoding

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, two spaces, a newline at the end."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "manifest.json") -> "Manifest":
        """Parse; `DataError` names the file for broken JSON, a missing key, another version."""
        try:
            raw = json.loads(text)
            version = raw["format_version"]
            if version != FORMAT_VERSION:
                raise DataError(
                    f"{where}: format version {version!r} is not {FORMAT_VERSION}, the one that "
                    "this program reads; extract again or use a matching release"
                )
            geometry = Geometry(**raw.pop("geometry"))
            return Manifest(geometry=geometry, taps=tuple(raw.pop("taps")), **raw)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: the manifest cannot be read ({error})") from error

    def digest(self) -> str:
        """sha256 hex of `to_json`; every shard repeats it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        parts = (_flatten(f"{prefix}.{key}" if prefix else str(key), v) for key, v in value.items())
        return {key: v for part in parts for key, v in part.items()}
    return {prefix: value}


def identity_fields(have: Manifest, want: Manifest) -> list[tuple[str, Any, Any]]:
    """(name, of `have`, of `want`); what people choose first, what follows from it last."""
    pairs: list[tuple[str, Any, Any]] = [("taps", list(have.taps), list(want.taps))]
    left, right = have.geometry.to_dict(), want.geometry.to_dict()
    pairs += [(n, left[n], right[n]) for n in ("seq_len", "hidden", "encoding")]
    # Through JSON, so that a tuple of the caller equals the list in the file.
    left, right = (_flatten("", json.loads(json.dumps(m.identity))) for m in (have, want))
    pairs += [(n, left.get(n), right.get(n)) for n in sorted(left.keys() | right.keys())]
    pairs.append(("rows_per_shard", have.geometry.rows_per_shard, want.geometry.rows_per_shard))
    pairs.append(("plan digest", have.plan_digest, want.plan_digest))
    return pairs


def show_value(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return f"{value[:12]}... (sha256)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
