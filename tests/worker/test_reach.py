"""What may be reached from other machines, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import StartupError
from outrider.options.protection import Protection, TlsFiles, check_reach, is_loopback

FILES = TlsFiles(Path("cert"), Path("key"))


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("fe80::1", False),
        ("no.such.host.invalid", False),
        ("127.0.0.1.example.invalid", False),
        ("a" * 300, False),
    ],
)
def test_only_this_machine_reaches_loopback(host: str, here: bool) -> None:
    assert is_loopback(host) == here


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
def test_another_address_needs_one_of_two_words(host: str) -> None:
    with pytest.raises(StartupError) as refused:
        check_reach(host, None, None, insecure=False)
    assert "--tls-cert, --tls-key and --tls-ca" in refused.value.message
    assert "--insecure" in refused.value.message
    check_reach(host, None, FILES, insecure=False)
    check_reach(host, None, None, insecure=True)
    check_reach("127.0.0.1", None, None, insecure=False)


def test_prompts_are_kept_in_the_store_so_it_is_a_listener_like_any_other() -> None:
    for tls in (None, FILES):
        with pytest.raises(StartupError, match="use rediss://, or say --insecure") as refused:
            check_reach("127.0.0.1", "redis://:secret@10.0.0.1/0", tls, insecure=False)
        assert "secret" not in refused.value.message
    check_reach("127.0.0.1", "redis://10.0.0.1", None, insecure=True)
    check_reach("127.0.0.1", "rediss://10.0.0.1", None, insecure=False)
    check_reach("127.0.0.1", "redis://127.0.0.1", None, insecure=False)


def test_a_certificate_and_its_key_belong_together() -> None:
    assert Protection().tls is None
    assert Protection(FILES.cert, FILES.key).tls == FILES
    for given, sentence in (
        ((FILES.cert, None, None), "--tls-cert is given without --tls-key"),
        ((None, FILES.key, None), "--tls-key is given without --tls-cert"),
        ((None, FILES.key, Path("ca")), "--tls-key is given without --tls-cert"),
        ((None, None, Path("ca")), "--tls-ca is given without --tls-cert and --tls-key"),
    ):
        with pytest.raises(StartupError, match=sentence):
            Protection(*given)
