"""What a newcomer reads of the code, as ARCHITECTURE.md lists it, stays short."""

import re
from pathlib import Path

import pytest
from scripts import measure_code

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "title, max_files, max_tokens",
    [("Reinforcement (GRPO)", 15, 25_000), ("Supervised fine-tuning", 8, 12_000)],
)
def test_a_list_is_short_and_all_of_it_is_there(title, max_files, max_tokens):
    section = TEXT.split(f"**{title}**")[1].split("\n\n**")[0]
    files = re.findall(r"`([\w/]+\.py)`", section)
    modules = measure_code.read_modules(ROOT).values()
    listed = [module for module in modules if module.path.split("/lightrft/")[1] in files]
    assert 5 < len(listed) == len(files) <= max_files
    assert sum(module.num_tokens for module in listed) <= max_tokens


def test_every_file_that_is_named_is_there():
    packages = [*ROOT.glob("packages/*/src/lightrft")]
    named = re.findall(r"`([a-z_0-9]+/[\w/]+(?:\.py|/))`", TEXT)
    missing = [
        name for name in named if not any((folder / name).exists() for folder in [ROOT, *packages])
    ]
    assert len(named) > 30
    assert missing == []
