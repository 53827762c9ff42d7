"""Keys as they are stored, and as they are made."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.errors import StartupError
from outrider.net.watched import Watched
from outrider_cli.app import app
from router.api.keys import ApiKey, digest, find, keys_of, new_key, parse_keys, tokens_of

HASH = "ab" * 32


def test_a_line_is_read_as_it_was_written() -> None:
    keys = [ApiKey("alice", digest("a"), 3, 60), ApiKey("bob.b-2", digest("b"))]
    text = "# ours\n" + "\n\n".join(key.line + "  # comment" for key in keys)
    assert list(parse_keys(text)) == keys
    assert parse_keys(f"x sha256:{HASH} requests-per-minute=5") == (
        ApiKey("x", bytes.fromhex(HASH), None, 5),
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "there is no key; make one"),
        ("# nothing", "there is no key; make one"),
        (f"a/b sha256:{HASH}", "line 1: a name is"),
        ("alice", "line 1: must be NAME sha256:HEX"),
        ("alice sk-outrider-secret", "line 1: must be NAME sha256:HEX"),
        (f"alice sha256:{HASH[:-1]}", "line 1: must be NAME sha256:HEX"),
        (f"alice sha256:{HASH} max-concurrent=0", "line 1: limits are"),
        (f"alice sha256:{HASH} max-concurrent=1 max-concurrent=2", "line 1: limits are"),
        (f"alice sha256:{HASH} minute=1", "line 1: limits are"),
        (f"alice sha256:{HASH} requests-per-minute={'9' * 400}", "line 1: limits are"),
        (f"alice sha256:{HASH} requests-per-minute={'9' * 5000}", "line 1: limits are"),
        (f"# a comment\x0cwith \u2028 what is no end of it\nalice sha256:{HASH} x=1", "line 2: limits are"),
    ],
)
def test_a_wrong_line_is_named_and_not_quoted(line: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(line, "utf-8")
    for given in ((file, None), (None, line)):
        with pytest.raises(StartupError, match=re.escape(sentence)) as raised:
            keys_of(*given)
        assert "secret" not in raised.value.message


def test_a_pipe_is_no_file_of_keys(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(StartupError, match="it is no regular file"):
        keys_of(tmp_path / "keys", None)


def test_who_shows_a_key_is_known_by_it_alone() -> None:
    first, second = new_key(), new_key()
    keys = [ApiKey("alice", digest(first)), ApiKey("bob", digest(second)), ApiKey("alice", digest("next"))]
    assert [find(keys, shown) for shown in (first, second, "next")] == keys
    assert find(keys, first[:-1]) is find(keys, "") is find(keys, digest(first).hex()) is None


def test_a_file_that_changes_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(ApiKey("alice", digest("a")).line)
    keys = keys_of(file, None)
    assert keys is not None
    assert [key.name for key in keys()] == ["alice"]
    file.write_text("")
    assert [key.name for key in keys()] == ["alice"], "an empty file is one that is being written"
    assert [key.name for key in keys()] == ["alice"]
    assert len(caplog.records) == 1
    file.write_text(ApiKey("bobby", digest("a")).line)
    assert [key.name for key in keys()] == ["bobby"]
    file.write_text(ApiKey("carol", digest("a")).line)  # in place, and as long
    os.utime(file, ns=(0, 0))
    assert [key.name for key in keys()] == ["carol"]


def test_what_changes_while_it_is_read_is_read_again_before_it_is_in_force(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    coming = ["half", "whole"]

    def read() -> str:
        held = file.read_text()
        if held == "half":
            file.write_text(coming.pop())
        return held

    watched = Watched("the file", [file], read)
    file.write_text(coming.pop(0))
    assert [watched.current(), watched.current()] == ["old", "whole"]


def test_the_command_shows_a_key_once_and_stores_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    said = [
        CliRunner()
        .invoke(app, ["keys", "add", name, "--api-keys", str(file), "--max-concurrent", "2"])
        .output
        for name in ("alice", "bob")
    ]
    made = [re.findall(r"sk-outrider-[\w-]{43}", text) for text in said]
    assert [len(keys) for keys in made] == [1, 1]
    stored = parse_keys(file.read_text())
    assert [find(stored, keys[0]) for keys in made] == list(stored)
    assert [key.name for key in stored] == ["alice", "bob"]
    assert {key.max_concurrent for key in stored} == {2}
    assert made[0][0] not in file.read_text()
    wrong = CliRunner().invoke(app, ["keys", "add", "a b"])
    assert wrong.exit_code == 1
    assert "'a b' is no name" in wrong.output


def test_a_drafters_token_is_made_kept_hashed_and_taken_away(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    made = CliRunner().invoke(app, ["keys", "add", "laptop", "--drafter-tokens", str(file)])
    (token,) = re.findall(r"token, for laptop alone, not shown again: (dt-outrider-\S+)", made.stdout)
    assert token not in file.read_text()
    tokens = tokens_of(file)
    found = find(tokens(), token)
    assert found is not None and found.name == "laptop"
    file.write_text("# nobody any more\n")
    assert tokens() == ()
    file.write_text(f"laptop sha256:{HASH} requests-per-minute=5")
    with pytest.raises(StartupError, match="requests-per-minute is for API keys"):
        tokens_of(file)
    assert tokens() == ()


@pytest.mark.parametrize(
    ("also", "sentence"),
    [
        (["--api-keys", "keys"], "--api-keys and --drafter-tokens are for one kind of secret each"),
        (["--requests-per-minute", "5"], "--requests-per-minute is for API keys"),
    ],
)
def test_what_no_token_has(also: list[str], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    wrong = CliRunner().invoke(app, ["keys", "add", "laptop", "--drafter-tokens", str(file), *also])
    assert wrong.exit_code == 1 and wrong.stderr.startswith(f"outrider keys: {sentence}")
    assert not file.exists()
