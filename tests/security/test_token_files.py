"""rpc/tokens.py: which token is whose, and which files are not believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prefixd_server.base.errors import ConfigError
from prefixd_server.rpc import tokens
from prefixd_server.rpc.tokens import TokenBook

ALICE, NEXT, BOB = "a" * 32, "n" * 40, "b" * 512


def token_file(path: Path, *lines: str, mode: int = 0o600) -> Path:
    """A file of tokens."""
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)
    return path


@pytest.fixture
def book(tmp_path: Path) -> TokenBook:
    """Two tokens of alice, one of bob."""
    return TokenBook(
        {
            "alice": token_file(tmp_path / "alice", "", ALICE, f"  {NEXT} ", ""),
            "bob": token_file(tmp_path / "bob", BOB),
        }
    )


def test_each_token_is_its_tenants_and_no_other_text_is_anybodys(book: TokenBook) -> None:
    assert [book.tenant_of(token) for token in (ALICE, NEXT, BOB)] == ["alice", "alice", "bob"]
    for text in ("", " ", ALICE[:-1], ALICE + "a", ALICE.upper(), f"{ALICE}\n{NEXT}", "\udcff" * 32):
        assert book.tenant_of(text) is None


def test_a_token_is_compared_wholly_with_every_one_and_kept_by_nobody(
    book: TokenBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(tokens.hmac, "compare_digest", compare)
    for token in (ALICE, "x"):
        book.tenant_of(token)
    assert compared == [(32, 32)] * 6
    assert ALICE not in repr(vars(book))


def test_a_changed_file_is_read_again_and_a_removed_token_ends(tmp_path: Path, book: TokenBook) -> None:
    token_file(tmp_path / "alice", NEXT)
    assert (book.tenant_of(ALICE), book.tenant_of(NEXT)) == (None, "alice")


def test_a_change_that_cannot_be_used_is_told_once_and_leaves_what_was_in_force(
    tmp_path: Path, book: TokenBook, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "alice").chmod(0o644)
    assert book.tenant_of(ALICE) == "alice"
    assert book.tenant_of(ALICE) == "alice"
    assert caplog.text.count("TOKENS_UNUSABLE") == 1
    assert ALICE not in caplog.text
    (tmp_path / "alice").unlink()
    assert book.tenant_of(ALICE) == "alice"
    assert caplog.text.count("TOKENS_UNUSABLE") == 2
    token_file(tmp_path / "alice", NEXT)
    assert book.tenant_of(ALICE) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_may_open_is_not_believed(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 0600") as refused:
        TokenBook({"t": token_file(tmp_path / "t", ALICE, mode=mode)})
    assert refused.value.reason == "TOKENS_UNUSABLE"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_another_users_file_is_not_believed(tmp_path: Path) -> None:
    path = token_file(tmp_path / "t", ALICE)
    os.chown(path, 12_345, -1)
    with pytest.raises(ConfigError, match="another user"):
        TokenBook({"t": path})


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "1 to 16 tokens"),
        (["x" * 40 + str(number) for number in range(17)], "1 to 16 tokens"),
        (["x" * 31], "printable ASCII"),
        (["x" * 513], "printable ASCII"),
        (["x" * 40 + " y"], "printable ASCII"),
        (["é" * 40], "printable ASCII"),
        (["x" * 500] * 40, "more than 16,384 bytes"),
    ],
)
def test_a_file_of_no_tokens_is_refused_without_showing_them(
    tmp_path: Path, lines: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        TokenBook({"t": token_file(tmp_path / "t", *lines)})
    assert "xxx" not in refused.value.message


def test_a_missing_file_a_directory_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError):
            TokenBook({"t": path})


def test_one_token_of_two_tenants_is_refused(tmp_path: Path) -> None:
    files = {name: token_file(tmp_path / name, ALICE) for name in ("alice", "bob")}
    with pytest.raises(ConfigError, match="also of tenant 'alice'"):
        TokenBook(files)
