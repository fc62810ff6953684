"""Disks that fail in the middle: no room, errors, system calls that move less than they were asked to."""

import subprocess

import pytest

from support.killing import CATALOG, WORK, claims_nothing_false, left_in, same_tree


def is_said(done, *words):
    """In plain words, and that one may go on."""
    assert done.code == 2, done.text
    assert done.text.startswith("error: "), done.text
    assert "Traceback" not in done.text, done.text
    for word in words:
        assert word in done.text


def resumes(forker, made, out):
    claims_nothing_false(out, made / "bf16-e4m3")
    left = left_in(out)
    forker.finish(made / "bf16", out)
    same_tree(out, made / "bf16-e4m3")
    left.is_kept(out)


@pytest.mark.parametrize("workers", [1, 2])
def test_files_that_cannot_grow(disturbed, forker, made, out, workers):
    """Every write fails from some moment on: as on a full disk, but anybody may try it."""
    for at, done in disturbed(made / "bf16", deed="full", workers=workers):
        if done.code or not (out / CATALOG).exists():
            is_said(done, "File too large", "same command", str(out))
        assert not list(out.glob(f"{WORK}/*.partial")), f"{at}: what is half written takes the room that is wanted"
        resumes(forker, made, out)


def test_a_full_disk(forker, made, tmp_path, step):
    """A real one, small, and filled to the brim at some moment."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        for at in range(1, 60, step):
            out = disk / "out"
            done = forker.convert(made / "bf16", out, at=at, deed="fill")
            assert done.reached
            is_said(done, "No space left", "same command", str(out))
            assert not list(out.glob(f"{WORK}/*.partial")), at
            (disk / "ballast").unlink()
            resumes(forker, made, out)
            subprocess.run(["rm", "-r", str(out)], check=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_once(disturbed, forker, made, out, workers):
    """Anything that changes the disk may fail: the rename, the lock, the fsync."""
    for at, done in disturbed(made / "bf16", deed="error", workers=workers):
        if done.code or not (out / CATALOG).exists():
            is_said(done, str(out))
            assert "Input/output error" in done.text, (at, done.text)
        resumes(forker, made, out)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_that_cannot_be_read(disturbed, forker, made, out, workers):
    """An error of the source's disk, at any of the reads: it is the checkpoint that is named, not OUT."""
    for at, done in disturbed(made / "bf16", deed="unreadable", workers=workers):
        is_said(done, "Input/output error", str(made / "bf16"))
        assert not (out / CATALOG).exists(), at
        resumes(forker, made, out)


@pytest.mark.parametrize("workers", [1, 2])
def test_system_calls_that_move_less(forker, made, out, workers):
    """As they may: near the end of a disk, on networks, above 2 GiB."""
    forker.finish(made / "bf16", out, workers=workers, short=True)
    same_tree(out, made / "bf16-e4m3")
