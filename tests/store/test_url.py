"""Urls of stores, and what is said about bad ones."""

from pathlib import Path

import pytest

from outrider.errors import StartupError
from outrider.store.url import StoreUrl, parse_store_url


def test_a_url_says_where_the_redis_is_and_what_it_wants_to_know(tmp_path: Path) -> None:
    assert parse_store_url("redis://h") == StoreUrl("h", 6379, 0, None, None, False, None)
    assert parse_store_url("redis://:p%40ss@[::1]:7/3") == StoreUrl("::1", 7, 3, None, "p@ss", False, None)
    authority = tmp_path / "ca.pem"
    authority.write_text("")
    parsed = parse_store_url(f"rediss://me:pass@h:1/?ssl_ca_certs={authority}")
    assert parsed == StoreUrl("h", 1, 0, "me", "pass", True, str(authority))


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "must begin with redis:// or rediss://"),
        ("localhost:6379", "must begin with"),
        ("http://:secret@h", "must begin with"),
        ("unix:///secret", "must begin with"),
        ("redis://:secret@", "names no host"),
        ("redis://:secret@h:70000", "is no url"),
        ("redis://:secret@h:port", "is no url"),
        ("redis://:secret[@h", "is no url"),
        ("redis://:secret@h/db", "number of a database"),
        ("redis://:secret@h/1/2", "number of a database"),
        ("redis://:secret@h?db=1", "no options but"),
        ("rediss://:secret@h?ssl_cert_reqs=none", "no options but"),
        ("redis://:secret@h#x", "no options but"),
        ("redis://:secret@h?ssl_ca_certs=/x", "without TLS"),
        ("rediss://:secret@h?ssl_ca_certs=/does/not/exist", "'/does/not/exist', which does not exist"),
    ],
)
def test_a_bad_url_is_refused_with_a_sentence_that_names_the_flag_and_no_password(
    url: str, what: str
) -> None:
    with pytest.raises(StartupError) as refused:
        parse_store_url(url)
    assert refused.value.message.startswith("--store")
    assert what in refused.value.message
    assert "secret" not in refused.value.message


def test_a_password_is_not_in_what_is_logged_of_a_url() -> None:
    assert "secret" not in f"{parse_store_url('redis://me:secret@h')!r}"
