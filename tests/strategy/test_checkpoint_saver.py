"""Saving in the background: the same files, completed before older ones go, errors not lost."""

import threading

import pytest
import torch

from lightrft.strategy import get_fake_strategy
from lightrft.strategy.checkpoints.checkpoints import CheckpointSaver
from lightrft.strategy.checkpoints.files import FileWriter, StagedWriter
from lightrft.strategy.checkpoints.folders import SaveRequest
from lightrft.strategy.checkpoints.manifest import list_checkpoints
from lightrft.strategy.distributed.collectives import ALONE
from lightrft.strategy.distributed.process_end import CheckpointError


def saver():
    return CheckpointSaver(ALONE, lambda: ALONE)


def request(folder, tag, **options):
    return SaveRequest(save_dir=folder, strategy="Test", tag=tag, **options)


def tags(folder):
    return [item.manifest.tag for item in list_checkpoints(folder)]


class Slow(StagedWriter):
    """Waits for a permission before it writes."""

    def __init__(self):
        super().__init__()
        self.may_write = threading.Event()

    def flush(self):
        assert self.may_write.wait(60)
        super().flush()


def write_text(text):
    return lambda folder, files: files.text(folder / "weights.txt", text)


def test_the_files_are_those_of_a_direct_save(tmp_path):
    manifests = {}
    for is_async in (False, True):
        torch.manual_seed(3)
        strategy = get_fake_strategy({"async_save": is_async, "train_batch_size": 1})
        model = torch.nn.Linear(3, 2)
        ready, *_ = strategy.prepare_models_and_optimizers(model, None, None, None, None, 5)
        average = strategy.prepare_model(torch.nn.Linear(3, 2))
        strategy.backward(model(torch.ones(1, 3)).sum(), model, ready.optimizer)
        strategy.optimizer_step(ready.optimizer, model, ready.scheduler)
        state = {"global_step": 1, "moments": torch.arange(3.0)}
        folder = tmp_path / str(is_async)
        strategy.save_ckpt(ready, str(folder), client_state=state, model_ema=average)
        # Changes after the call are not in the checkpoint.
        torch.nn.init.zeros_(model.weight)
        strategy.finish_saving()
        (found,) = list_checkpoints(folder)
        manifests[is_async] = found.manifest
        strategy.close()
    direct, background = manifests[False], manifests[True]
    assert direct.files == background.files


def test_an_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    from lightrft.strategy.checkpoints import checkpoints as checkpoint_saver

    staged = [Slow(), Slow()]
    staged[0].may_write.set()
    waiting = iter(staged)
    monkeypatch.setattr(checkpoint_saver, "StagedWriter", lambda: next(waiting))
    background = saver()
    background.save(request(tmp_path, "first", max_num=1), write_text("1"))
    background.save(request(tmp_path, "second", max_num=1), write_text("2"))
    assert tags(tmp_path) == ["first"]
    staged[1].may_write.set()
    background.finish()
    assert tags(tmp_path) == ["second"]
    background.close()


def fail(folder, files):
    files.text(folder / "missing folder/weights.txt", "")


def test_an_error_surfaces_at_the_next_save_into_the_folder(tmp_path):
    background = saver()
    background.save(request(tmp_path, "good"), write_text("1"))
    background.save(request(tmp_path, "bad"), fail)
    with pytest.raises(CheckpointError, match=r"saving into .* failed: rank 0: FileNotFoundError"):
        background.save(request(tmp_path, "next"), write_text("3"))
    assert tags(tmp_path) == ["good"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]
    background.save(request(tmp_path, "next"), write_text("3"))
    background.close()
    assert tags(tmp_path) == ["good", "next"]


def test_an_error_surfaces_at_the_end_and_everything_is_closed(tmp_path):
    strategy = get_fake_strategy({"async_save": True, "train_batch_size": 1})
    strategy.checkpoints.saver.save(request(tmp_path, "bad"), fail)
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        strategy.close()
    strategy.close()


def test_what_was_saved_after_a_failed_save_is_not_published(tmp_path):
    """A run saves its critic first: no actor without its critic."""
    background = saver()
    background.save(request(tmp_path / "critic", "step1"), fail)
    background.save(request(tmp_path / "actor", "step1"), write_text("1"))
    with pytest.raises(CheckpointError, match=r"FileNotFoundError.*an earlier save failed"):
        background.finish()
    assert tags(tmp_path / "actor") == []
    background.close()


def test_tensors_with_shared_storage_are_written_apart(tmp_path):
    whole = torch.arange(6.0)
    for writer in (FileWriter(), StagedWriter()):
        file = tmp_path / f"{type(writer).__name__}.safetensors"
        writer.tensors(file, {"whole": whole, "part": whole[2:4], "turned": whole.view(2, 3).T})
        if isinstance(writer, StagedWriter):
            assert not file.exists()
            writer.flush()
        from safetensors.torch import load_file

        found = load_file(file)
        assert found["part"].tolist() == [2.0, 3.0]
        assert found["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
