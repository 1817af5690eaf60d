"""HTTPS: certificates, clients with and without theirs, and renewal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import httpx2 as httpx
import openai
import pytest
from cryptography.hazmat.primitives import serialization

import jaxserve.serving.tls
from jaxserve import ConfigError
from jaxserve.serving.config import ServeConfig
from jaxserve.serving.tls import TlsFiles, when_renewed
from tests.serving.certificates import Authority
from tests.serving.http.conftest import TIMEOUT, Server, serving


def trusting(authority: Authority, certificate: tuple | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def ready(server: Server, context: ssl.SSLContext) -> bool:
    """On a connection of its own."""
    with httpx.Client(verify=context, timeout=TIMEOUT) as client:
        return client.get(f"https://127.0.0.1:{server.port}/health").status_code == 200


def test_https_and_its_renewal(server, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxserve.serving.tls, "RENEWAL_SECONDS", 0.01)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.sign("server")
    with serving(server.llm, tls=TlsFiles(certificate=certificate, key=key)) as secure:
        with httpx.Client(verify=trusting(old), timeout=TIMEOUT) as http:
            client = openai.OpenAI(base_url=f"https://127.0.0.1:{secure.port}/v1", api_key="none", http_client=http)
            chunks = client.completions.create(model="tiny", prompt="a", max_tokens=5, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1]
            health = f"https://127.0.0.1:{secure.port}/health"
            assert http.get(health).status_code == 200
            with pytest.raises(httpx.ConnectError):
                ready(secure, trusting(new))
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{secure.port}/health", timeout=TIMEOUT)
            for target, source in zip((certificate, key), new.sign("server")):
                source.replace(target)
            while True:
                try:
                    assert ready(secure, trusting(new))
                    break
                except httpx.ConnectError:
                    pass
            assert http.get(health).status_code == 200, "connections that are open stay open"
            with pytest.raises(httpx.ConnectError):
                ready(secure, trusting(old))


def test_clients_need_a_certificate(server, tmp_path):
    known, stranger = Authority(tmp_path / "known"), Authority(tmp_path / "stranger")
    certificate, key = known.sign("server")
    with serving(server.llm, tls=TlsFiles(certificate=certificate, key=key, client_ca=known.certificate)) as secure:
        assert ready(secure, trusting(known, known.sign("client")))
        for own in (None, stranger.sign("client")):
            with pytest.raises(httpx.TransportError):  # TLS 1.3: the refusal comes when the client reads
                ready(secure, trusting(known, own))


def test_another_authority_of_clients(server, tmp_path, monkeypatch):
    """Neither those of the old one are welcome any more, nor what they have kept of an earlier connection."""
    monkeypatch.setattr(jaxserve.serving.tls, "RENEWAL_SECONDS", 0.01)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.sign("server")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.certificate.read_bytes())

    def session(context: ssl.SSLContext, earlier: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        with (socket.create_connection(("127.0.0.1", secure.port), TIMEOUT) as plain,
              context.wrap_socket(plain, server_hostname="127.0.0.1", session=earlier) as connection):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            if not connection.recv(9).startswith(b"HTTP/1.1"):
                raise ConnectionResetError
            assert earlier is None or connection.session_reused
            return connection.session

    with serving(server.llm, tls=TlsFiles(certificate=certificate, key=key, client_ca=trusted)) as secure:
        with_old, with_new = trusting(old, old.sign("client")), trusting(old, new.sign("client"))
        kept = session(with_old)
        session(with_old, kept)
        with pytest.raises(OSError):
            session(with_new)
        new.certificate.replace(trusted)
        while True:
            with contextlib.suppress(OSError):
                session(with_new)
                break
        for earlier in (None, kept):
            with pytest.raises(OSError):
                session(with_old, earlier)


def test_a_renewal_that_fails_is_tried_again(tmp_path, monkeypatch, caplog):
    """Whatever the fault; it is said once of each state of the files."""
    monkeypatch.setattr(jaxserve.serving.tls, "RENEWAL_SECONDS", 0)
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.sign("server")
    files = TlsFiles(certificate=certificate, key=key)

    async def main() -> None:
        known, used, tries = files.stamp(), asyncio.Event(), 0
        files.certificate.rename(tmp_path / "away")

        async def use(_: ssl.SSLContext) -> None:
            nonlocal tries
            tries += 1
            if tries <= 3:
                raise RuntimeError("not now")
            used.set()

        async def said(text: str) -> None:
            while text not in caplog.text:
                await asyncio.sleep(0)

        renewing = asyncio.ensure_future(when_renewed(files, known, use))
        await said("No such file")
        for target, source in zip((certificate, key), authority.sign("renewed")):
            source.replace(target)
        await used.wait()
        await said("has been renewed")
        renewing.cancel()
        assert tries == 4

    with caplog.at_level("INFO", "jaxserve"):
        asyncio.run(main())
    assert caplog.text.count("not used yet: not now") == 1


def test_connections_within_their_handshake_count(server, tmp_path):
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.sign("server")
    with serving(server.llm, tls=TlsFiles(certificate=certificate, key=key), max_connections=3) as secure:
        address = ("127.0.0.1", secure.port)
        with contextlib.ExitStack() as stack:
            for beginning in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00"):
                stack.enter_context(socket.create_connection(address, TIMEOUT)).sendall(beginning)
            with socket.create_connection(address, TIMEOUT) as fourth, contextlib.suppress(ConnectionResetError):
                assert fourth.recv(1) == b""
        while True:  # they have left
            with contextlib.suppress(httpx.TransportError):
                assert ready(secure, trusting(authority))
                break


def test_files_that_are_of_no_use(tmp_path):
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    certificate, key = authority.sign("server")
    locked = tmp_path / "locked.key"
    locked.write_bytes(serialization.load_pem_private_key(key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")))
    for files in (TlsFiles(certificate=certificate, key=other.sign("server")[1]),
                  TlsFiles(certificate=key, key=key), TlsFiles(certificate=certificate, key=locked),
                  TlsFiles(certificate=certificate, key=key, client_ca=key),
                  TlsFiles(certificate=tmp_path / "none", key=key)):
        with pytest.raises(ConfigError, match="a TLS file is of no use"):
            files.context()
    with pytest.raises(ConfigError, match="ssl_client_ca needs"):
        ServeConfig(ssl_client_ca=str(certificate))
