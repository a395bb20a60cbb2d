"""Secrets in options: shown nowhere, saved nowhere, and the run can still be continued."""

import os
import stat

import pytest

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import mask_address
from lightrft.config.printable import one_line, printable
from lightrft.config.toml import write_whole
from lightrft.rewards import RewardError
from lightrft.tools.rewards.remote import RemoteReward, service_address

SECRET = "hunter2"


@pytest.mark.parametrize(
    "address",
    [
        "http://h/x?token=hunter2",
        "http://h/x?a=hunter2&b=hunter2#hunter2",
        "http://h?hunter2",
        "http://me:hunter2@h/x",
        "http://hunter2@h",
        "https://me:hunter2@h:1/x?k=hunter2",
        "ftp://a:hunter2@h",
        "//me:hunter2@h",
        "http://me:p?hunter2@h/x",
        "http://me:p@hunter2@h/x",
        "at 'http://h/?t=hunter2': and http://h/?t=hunter2",
        "http://h/x?token=hunter2&n=${N}",
    ],
)
def test_user_and_query_of_an_address_are_masked(address):
    assert SECRET not in mask_address(address)
    assert "***" in mask_address(address)


@pytest.mark.parametrize(
    "text",
    [
        "http://h:1/x/y",
        "http://h/a@b",
        "what? me@home",
        "http://${U}:${P}@h/x?t=${TOKEN}",
        "a//b?",
        "FILE.py:NAME",
        "s3://bucket/x",
    ],
)
def test_what_tells_nothing_stays(text):
    assert mask_address(text) == text


def config(**options):
    return TrainConfig(
        remote_rm_url=(f"http://h/x?token={SECRET}", f"http://me:{SECRET}@h/y"),
        remote_rm_token=SECRET,
        use_wandb=SECRET,
        engine_args={"api_key": SECRET},
        **options,
    )


def test_neither_the_saved_nor_the_shown_configuration_holds_a_secret(tmp_path):
    path = tmp_path / "config.toml"
    config().save(path)
    assert SECRET not in path.read_text() + config().summary()
    assert SECRET in TrainConfig(reward_recipe_column=SECRET).summary()  # the positive control
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    config().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_other_files_follow_the_mask_of_the_process(tmp_path):
    mask = os.umask(0o027)
    try:
        write_whole(tmp_path / "report.html", "x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o640


def test_a_saved_address_without_its_secret_is_refused_and_says_how_to_go_on(tmp_path):
    path = tmp_path / "config.toml"
    config().save(path)
    for address in TrainConfig.load(path).remote_rm_url:
        with pytest.raises(ConfigError, match=r"left out when it was saved: .*\$\{NAME\}"):
            service_address(address)


def test_an_address_with_variables_is_saved_as_it_is_and_filled_in_where_it_is_used(
    tmp_path, monkeypatch
):
    address = "http://${WHO}:${PW}@h:1/x?token=${REWARD_TOKEN}"
    path = tmp_path / "config.toml"
    TrainConfig(remote_rm_url=address).save(path)
    assert TrainConfig.load(path).remote_rm_url == address
    with pytest.raises(ConfigError, match="names the environment variable WHO, which is not set"):
        service_address(address)
    for name, value in {"WHO": "me", "PW": SECRET, "REWARD_TOKEN": SECRET}.items():
        monkeypatch.setenv(name, value)
    assert service_address(address) == f"http://me:{SECRET}@h:1/x?token={SECRET}"
    with pytest.raises(RewardError, match="a column is no JSON") as caught:
        RemoteReward(address).score(["p"], ["r"], [None], {"k": [object()]})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "x",
        "",
        "ftp://h",
        "http://",
        "http://:80/",
        "http://h:99999/",
        "http://[::1",
        "http://a b/",
        "http://h/\x1b[2J",
        "http://h:0/",
    ],
)
def test_what_is_no_address_is_refused_before_the_run_in_one_printable_line(address):
    with pytest.raises(ConfigError, match="remote_rm_url: got") as caught:
        RemoteReward(address)
    assert str(caught.value).isprintable()


def test_no_character_that_a_terminal_obeys_is_left():
    obeyed = [
        *map(chr, range(32)),
        "\x7f",
        *map(chr, range(0x80, 0xA0)),
        "\u202a",
        "\u202e",
        "\u2066",
        "\u2028",
        "\ufeff",
        "\ud800",
        "\U000e0001",
        "\u200f",
    ]
    for character in obeyed:
        shown = printable(f"a{character}b")
        assert character in "\n\t" or (character not in shown and shown.startswith("a\\")), shown
    for text in ("plain\n\ttext", "é ß 中文 العربية हिन्दी", "👨\u200d👩\u200d👧", "a\u00a0b"):
        assert printable(text) == text
    assert printable("x" * 10, limit=4) == "xxxx ... (6 more characters)"
    assert one_line(" a\r\n b\x1b ") == "a b\\x1b"
