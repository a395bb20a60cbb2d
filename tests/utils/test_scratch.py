"""Temporary folders that end with their process."""

import tempfile

from lightrft.utils.scratch import scratch_folder


def test_a_killed_process_leaves_nothing_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "lightrft_scratch_left/phases").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "lightrft_scratch_link").symlink_to(tmp_path / "mine")
    with scratch_folder() as one, scratch_folder() as two:
        assert one != two
        assert one.is_dir()
        assert {p.name for p in tmp_path.iterdir()} == {
            one.name,
            two.name,
            "mine",
            "lightrft_scratch_link",
        }
    assert {p.name for p in tmp_path.iterdir()} == {"mine", "lightrft_scratch_link"}
