"""A certificate of the webhook's own, by an authority that signs nothing else; for clusters without cert-manager.

The authority's key is forgotten once it has signed: whoever reads the Secret can be the webhook, and nobody else. A new
certificate therefore has a new authority, and for a while both are trusted.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sftriage.kube.client import JSON_PATCH, MERGE, ClusterObjects, path_of
from sftriage.kube.serving import CERTIFICATE, KEY

if TYPE_CHECKING:
    from cryptography import x509

AUTHORITY = "ca.crt"
VALID_DAYS, RENEWED_DAYS = 365, 60
"""How long a certificate is valid, and how many days before its end there is another."""
_SLACK = datetime.timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, its key, and who has signed it; each as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes

    def files(self) -> dict[str, bytes]:
        """By the names of files in the webhook's directory."""
        return {AUTHORITY: self.authority, CERTIFICATE: self.certificate, KEY: self.key}


def issued(names: Sequence[str], now: datetime.datetime, days: int = VALID_DAYS) -> Issued:
    """A new certificate for names and addresses, by a new authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    pem, until = serialization.Encoding.PEM, now + datetime.timedelta(days=days)
    signs, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def begun(common_name: str, public: ec.EllipticCurvePublicKey, issuer: str) -> x509.CertificateBuilder:
        subject, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (common_name, issuer))
        made = x509.CertificateBuilder(by, subject, public, x509.random_serial_number())
        return made.not_valid_before(now - _SLACK).not_valid_after(until)

    authority = (
        begun("sftriage webhook authority", signs.public_key(), "sftriage webhook authority")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(signs.public_key()), critical=False)
        .sign(signs, hashes.SHA256())
    )
    certificate = (
        begun("sftriage webhook", key.public_key(), "sftriage webhook authority")
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_name(one) for one in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signs.public_key()), critical=False)
        .sign(signs, hashes.SHA256())
    )
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Issued(authority.public_bytes(pem), certificate.public_bytes(pem), private)


def _name(said: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(said))
    except ValueError:
        return x509.DNSName(said)


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """What an API server calls a service by."""
    return f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local", f"{service}.{namespace}"


def good_until(files: Mapping[str, bytes], names: Sequence[str]) -> datetime.datetime | None:
    """Until when what lies in a Secret is good for these names; None where it is not."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization

    try:
        certificate = x509.load_pem_x509_certificate(files[CERTIFICATE])
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(files[AUTHORITY]))
        key = serialization.load_pem_private_key(files[KEY], None)
        said = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (KeyError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return None
    if key.public_key() != certificate.public_key() or not {_name(one) for one in names} <= set(said):
        return None
    return certificate.not_valid_after_utc


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be so: the Secret's content (None: it is good as it is), and what each webhook is to trust."""

    issued: Issued | None
    trusted: bytes


def wanted(
    files: Mapping[str, bytes], trusted: bytes, names: Sequence[str], now: datetime.datetime, days: int = VALID_DAYS
) -> Wanted:
    """What is to be so, where a Secret has these files, and a webhook trusts that now."""
    until = good_until(files, names)
    if until is not None and until - now > datetime.timedelta(days=RENEWED_DAYS):
        authority = files[AUTHORITY]
        return Wanted(None, trusted if authority.strip() in trusted else authority)
    made = issued(names, now, days)
    # (until all webhooks have the new one, some answer with that of before)
    before = files.get(AUTHORITY, b"") if until is not None else b""
    return Wanted(made, made.authority + before)


class Certifier:
    """Brings a webhook's Secret and configuration to `wanted`; needs rights on these two objects alone.

    Args:
        objects: the cluster.
        namespace: of the Secret and the service.
        secret: its name; it has to exist, empty to begin with.
        service: the webhook's Service, which the API server calls.
        configuration: name of the MutatingWebhookConfiguration.
    """

    def __init__(self, objects: ClusterObjects, namespace: str, secret: str, service: str, configuration: str) -> None:
        self._objects, self._names = objects, service_names(service, namespace)
        self._secret = path_of("v1", "secrets", namespace, secret)
        hooks = path_of("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations")
        self._configuration = f"{hooks}/{configuration}"

    def certify(self, now: datetime.datetime) -> str:
        """Do what is needed, and return that in words.

        Raises:
            ClusterError: it failed; the message says why.
        """
        data = self._objects.ask("GET", self._secret).get("data") or {}
        files = {name: base64.b64decode(value) for name, value in data.items()}
        found = self._objects.ask("GET", self._configuration)
        webhooks = found.get("webhooks") or []
        said = {one["clientConfig"].get("caBundle", "") for one in webhooks}
        trusted = base64.b64decode(said.pop()) if len(said) == 1 else b""
        want = wanted(files, trusted, self._names, now)
        # First what is trusted: with a certificate that nobody trusts yet, pods would be created unwatched.
        if want.trusted != trusted:
            bundle = base64.b64encode(want.trusted).decode()
            patch = [
                {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
                for index in range(len(webhooks))
            ]
            # (if somebody has changed the list meanwhile, nothing is written, and it is tried again)
            test = {"op": "test", "path": "/metadata/resourceVersion", "value": found["metadata"]["resourceVersion"]}
            self._objects.ask("PATCH", self._configuration, [test, *patch], as_=JSON_PATCH)
        if want.issued is not None:
            data = {name: base64.b64encode(value).decode() for name, value in want.issued.files().items()}
            self._objects.ask("PATCH", self._secret, {"data": data}, as_=MERGE)
            return "a new certificate is in the Secret, and its authority is trusted"
        return "the certificate is good" + ("" if want.trusted == trusted else ", and its authority is trusted now")
