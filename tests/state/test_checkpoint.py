"""A checkpoint is whole or absent, and one that was touched is not used."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CheckpointError
from swarm.state import CheckpointStore, checkpoint

TENSORS = {
    "param/a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "param/b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "version": torch.tensor(3),
}


def opened(folder, *, run_id="run", stage=1, keep=2) -> CheckpointStore:
    return CheckpointStore(folder, run_id=run_id, stage=stage, keep=keep)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return opened(tmp_path / "checkpoints")


def refuse(monkeypatch, module, name, code=errno.ENOSPC):
    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, name, refused)


def test_what_is_saved_comes_back_to_the_bit(store):
    store.save(3, TENSORS, {"note": "x"})
    loaded = store.load(3)
    assert loaded.step == 3
    assert loaded.meta["note"] == "x"
    assert loaded.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)


def test_only_the_owner_can_read_it(store):
    store.folder.chmod(0o755)
    store = opened(store.folder)
    path = store.save(3, TENSORS, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_the_newest_few_are_kept(store):
    for step in (5, 10, 15, 20):
        store.save(step, TENSORS, {})
    assert store.steps() == [15, 20]


@pytest.mark.parametrize(("module", "name"), [(os, "replace"), (checkpoint, "save_file"), (os, "fsync")])
def test_a_disk_that_refuses_leaves_the_checkpoint_before(store, monkeypatch, module, name):
    store.save(5, TENSORS, {})
    with monkeypatch.context() as patch:
        refuse(patch, module, name)
        with pytest.raises(CheckpointError, match=r"could not be written: .*No space left on device.* Make room"):
            store.save(10, {"param/a": torch.zeros(2)}, {})
    assert store.steps() == [5]
    assert torch.equal(store.load(5).tensors["param/a"], TENSORS["param/a"])
    assert [entry.name for entry in store.folder.iterdir()] == ["step-0000000005.safetensors"]


def test_saving_a_step_again_replaces_it_whole(store, monkeypatch):
    store.save(5, TENSORS, {})
    with monkeypatch.context() as patch:
        refuse(patch, os, "replace")
        with pytest.raises(CheckpointError):
            store.save(5, {"param/a": torch.zeros(2)}, {})
    assert store.load(5).tensors.keys() == TENSORS.keys()
    store.save(5, {"param/a": torch.zeros(2)}, {})
    assert store.load(5).tensors.keys() == {"param/a"}


def test_a_truncated_file_is_refused_wherever_it_ends(store):
    path = store.save(3, TENSORS, {})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"step-0000000003\.safetensors of stage 1 cannot be used"):
            store.load(3)


def test_no_altered_byte_gives_other_tensors(store):
    path = store.save(3, TENSORS, {})
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        try:
            tensors = store.load(3).tensors
        except CheckpointError:
            continue
        # What is left are bytes that say nothing: names of keys in the metadata nobody reads, padding.
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_an_altered_tensor_byte_is_told_by_the_digest(store):
    path = store.save(3, TENSORS, {})
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 0x80
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        store.load(3)


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"run_id": "another"}, "its run_id is 'run', not 'another'"), ({"stage": 2}, "its stage is '1', not '2'")],
)
def test_a_checkpoint_of_another_run_or_stage_is_refused(store, other, reason):
    store.save(3, TENSORS, {})
    with pytest.raises(CheckpointError, match=reason):
        opened(store.folder, **other).load(3)


def test_a_renamed_checkpoint_is_not_that_step(store):
    path = store.save(3, TENSORS, {})
    path.rename(path.with_name("step-0000000009.safetensors"))
    with pytest.raises(CheckpointError, match="its step is '3', not '9'"):
        store.load(9)


def test_a_missing_checkpoint_is_an_error_of_ours(store):
    with pytest.raises(CheckpointError, match=r"step-0000000007\.safetensors"):
        store.load(7)


def test_newest_falls_back_past_broken_ones_and_reports_each(tmp_path):
    store = opened(tmp_path, keep=3)
    paths = [store.save(step, TENSORS, {}) for step in (5, 10, 15)]
    paths[2].write_bytes(b"")
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    reported: list[CheckpointError] = []
    found = store.newest(reported.append)
    assert found is not None
    assert found.step == 5
    assert ["step-0000000015" in str(reported[0]), "step-0000000010" in str(reported[1])] == [True, True]


def test_newest_goes_no_further_than_asked(tmp_path):
    store = opened(tmp_path, keep=3)
    for step in (5, 10, 15):
        store.save(step, TENSORS, {})
    found = store.newest(pytest.fail, at_most=14)
    assert found is not None
    assert found.step == 10
    assert store.newest(pytest.fail, at_most=4) is None


def test_discarding_forgets_the_future_only(tmp_path):
    store = opened(tmp_path, keep=3)
    for step in (5, 10, 15):
        store.save(step, TENSORS, {})
    store.discard_after(10)
    assert store.steps() == [5, 10]


def test_what_an_interrupted_save_left_is_removed_by_the_next_one(store):
    stale = store.folder / "step-0000000004.part"
    stale.write_bytes(b"half")
    assert opened(store.folder).steps() == []
    path = store.save(5, TENSORS, {})
    assert list(store.folder.iterdir()) == [path]


def test_opening_a_folder_lets_a_save_in_progress_be(store, monkeypatch):
    # A second process with the same state opens the folder before the journal refuses it.
    replace = os.replace

    def while_another_opens(*paths):
        opened(store.folder)
        replace(*paths)

    monkeypatch.setattr(os, "replace", while_another_opens)
    store.save(5, TENSORS, {})
    assert store.load(5).step == 5


def test_a_process_killed_while_saving_leaves_the_checkpoint_before(store):
    store.save(5, TENSORS, {})

    def killed() -> None:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        store.save(10, TENSORS, {})

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    again = opened(store.folder)
    assert again.steps() == [5]
    assert torch.equal(again.load(5).tensors["param/a"], TENSORS["param/a"])
    again.save(10, TENSORS, {})
    assert sorted(entry.name for entry in store.folder.iterdir()) == [
        "step-0000000005.safetensors",
        "step-0000000010.safetensors",
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_altered_header_is_never_another_kind_of_error(tmp_path_factory, data):
    store = opened(tmp_path_factory.mktemp("checkpoints"))
    path = store.save(3, TENSORS, {})
    whole = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(whole) - 1))
    altered = data.draw(st.binary(min_size=1, max_size=4))
    whole[start : start + len(altered)] = altered
    path.write_bytes(whole)
    try:
        tensors = store.load(3).tensors
    except CheckpointError:
        return
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_saving_needs_at_most_one_copy_of_the_tensors(tmp_path):
    size = 64 * 2**20
    store = opened(tmp_path)
    tensors = {f"p{number}": torch.ones(size // 16) for number in range(4)}

    def measured() -> None:
        # A forked process begins with its present size as its highest.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        store.save(1, tensors, {})
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 1.25 * size

    process = multiprocessing.get_context("fork").Process(target=measured)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("use", [CheckpointStore.steps, lambda store: store.discard_after(1)])
def test_a_folder_that_is_gone_is_an_error_of_ours(store, use):
    store.folder.rmdir()
    with pytest.raises(CheckpointError, match="No such file or directory"):
        use(store)


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be prepared"):
        opened(tmp_path / "file" / "checkpoints")
