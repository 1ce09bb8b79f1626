"""Who sends: tenants and bands by share."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.types import Band
from launcher.tenants import LocalTenant

_TERMS = ("weight", "limits")


class TenantsError(ValueError):
    """Tenants or bands that cannot be used; the message says what was wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class Sender:
    """A tenant with the key that names it, and its share of the requests (relative to the others')."""

    tenant_id: str
    api_key: str
    share: float = 1.0
    band: Band | None = None  # the tenant's own, if known
    terms: Mapping[str, object] = field(default_factory=dict, compare=False)  # weight, limits; of a local deployment

    def __repr__(self) -> str:
        return f"Sender({self.tenant_id}, share={self.share}, band={self.band})"  # keys stay out of logs


def load_senders(path: Path, *, is_local: bool = False) -> tuple[Sender, ...]:
    """Reads `{"tenants": [{"id": "acme", "api_key": "...", "share": 2, "band": "high"}, ...]}`.

    share (default 1) and band may be left out; the band is only a name for tables, the gateway goes by the key.
    For a local deployment the file makes the tenants: keys are made anew, `band` (default normal) is theirs, and
    `weight` and `limits` may be given as in a gateway's tenants file. Raises TenantsError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TenantsError(f"{path}: {error}") from error
    entries = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise TenantsError(f'{path}: must be an object with a list "tenants" that is not empty')
    make = _local_sender if is_local else _sender
    return tuple(make(f"{path}: entry {number}", entry) for number, entry in enumerate(entries, start=1))


def local_tenants(senders: Iterable[Sender]) -> tuple[LocalTenant, ...]:
    """The tenants of a deployment that is started for these senders."""
    return tuple(
        LocalTenant(each.tenant_id, (each.band or Band.NORMAL).name.lower(), each.api_key, each.terms)
        for each in senders
    )


def _local_sender(where: str, entry: object) -> Sender:
    known = {"id", "share", "band", *_TERMS}
    if not isinstance(entry, dict) or not {"id"} <= set(entry) <= known:
        raise TenantsError(f"{where}: must have id, may have share, band, weight and limits")
    sender = _sender(where, {name: value for name, value in entry.items() if name not in _TERMS} | {"api_key": ""})
    return replace(
        sender,
        api_key=secrets.token_urlsafe(18),
        band=sender.band or Band.NORMAL,
        terms={name: entry[name] for name in _TERMS if name in entry},
    )


def _sender(where: str, entry: object) -> Sender:
    known = {"id", "api_key", "share", "band"}
    if not isinstance(entry, dict) or not {"id", "api_key"} <= set(entry) <= known:
        raise TenantsError(f"{where}: must have id and api_key, may have share and band")
    share = entry.get("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or share <= 0:
        raise TenantsError(f"{where}: share must be a number above 0")
    band = parse_band(entry["band"]) if "band" in entry else None
    return Sender(str(entry["id"]), str(entry["api_key"]), float(share), band)


def parse_sender(text: str) -> Sender:
    """`ID=KEY` or `ID:SHARE=KEY`. Raises TenantsError."""
    name, equals, key = text.partition("=")
    tenant_id, _, share = name.partition(":")
    try:
        value = float(share or 1)
    except ValueError:
        value = 0.0
    if not equals or not tenant_id or not key or value <= 0:
        raise TenantsError("a tenant is ID=KEY or ID:SHARE=KEY, with a share above 0")
    return Sender(tenant_id, key, value)


def parse_band(text: object) -> Band:
    """`high`, `normal` or `low`. Raises TenantsError."""
    if text not in ("high", "normal", "low"):
        raise TenantsError(f"{text!r} is not a band: high, normal or low")
    return Band[str(text).upper()]


def parse_bands(text: str) -> dict[Band, float]:
    """`high=1,low=3`: which bands requests ask for, by share. Raises TenantsError."""
    shares: dict[Band, float] = {}
    for part in text.split(","):
        name, equals, share = part.partition("=")
        try:
            value = float(share) if equals else 1.0
        except ValueError:
            value = 0.0
        if value <= 0:
            raise TenantsError(f"{part!r} is not BAND=SHARE with a share above 0, as in low=3")
        shares[parse_band(name.strip())] = value
    return shares


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sends one request, and the band it asks for (None: the tenant's own)."""

    sender: Sender
    band: Band | None = None

    @property
    def band_name(self) -> str:
        """The band the request is served in, as far as is known here.

        A request can be lowered, never raised, so the lower of the two counts.
        """
        known = [band for band in (self.sender.band, self.band) if band is not None]
        return max(known).name.lower() if known else "tenant's own"


def assign(
    clients: Sequence[str], senders: Sequence[Sender], bands: dict[Band, float], rng: random.Random
) -> list[Origin]:
    """An origin for each request, in order.

    A request with a client's name goes to the tenant of that name, or, where there is none, each client to one tenant
    in turn of first appearance. Requests without a name are drawn by share.
    """
    by_id = {sender.tenant_id: sender for sender in senders}
    in_turn: dict[str, Sender] = {}
    origins = []
    for client in clients:
        if not client:
            sender = rng.choices(senders, weights=[each.share for each in senders])[0]
        elif client in by_id:
            sender = by_id[client]
        else:
            sender = in_turn.setdefault(client, senders[len(in_turn) % len(senders)])
        band = rng.choices(list(bands), weights=list(bands.values()))[0] if bands else None
        origins.append(Origin(sender, band))
    return origins


def describe(senders: Iterable[Sender]) -> list[dict[str, object]]:
    """The tenants without their keys."""
    return [
        {"id": each.tenant_id, "share": each.share, "band": each.band.name.lower() if each.band else None, **each.terms}
        for each in senders
    ]
