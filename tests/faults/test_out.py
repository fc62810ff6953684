"""The directory a conversion writes to: foreign, finished, unfinished, damaged, full, shared."""

import json
import os
import shutil
import subprocess

import pytest

from mosaic.convert import pipeline
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.convert.shard import ShardConversion
from mosaic.convert.target import locked
from mosaic.convert.verify import verify
from mosaic.format.errors import InputError
from mosaic.format.shard import read_header
from mosaic.format.source import Checkpoint
from support.faults import MOSAIC_CONVERT, convert_program, edit, edit_config, run, same_shards, snapshot


class TestOut:
    def refused(self, source, out, *facts, **options):
        with pytest.raises(InputError) as refusal:
            run(source, out, **options)
        for fact in (str(out), "remedy", *facts):
            assert fact in str(refusal.value)
        return refusal.value

    @pytest.mark.parametrize("place", [".", "sub", "a/b", "../bf16", "../bf16/../bf16/x"])
    def test_inside_the_checkpoint(self, bf16, place):
        before = snapshot(bf16)
        self.refused(bf16, bf16 / place, "lies in the checkpoint")
        assert snapshot(bf16) == before

    def test_inside_the_checkpoint_through_a_link(self, bf16):
        link = bf16.parent / "link"
        link.symlink_to(bf16)
        before = snapshot(bf16)
        for out in (link, link / "sub"):
            self.refused(bf16, out, "lies in the checkpoint")
        self.refused(link, bf16, "lies in the checkpoint")
        assert snapshot(bf16) == before

    def test_a_file(self, bf16):
        out = bf16.parent / "out"
        out.write_text("precious")
        self.refused(bf16, out, "is a file")
        assert out.read_text() == "precious"

    def test_below_a_file(self, bf16):
        (bf16.parent / "file").write_text("precious")
        self.refused(bf16, bf16.parent / "file" / "out")

    def test_a_broken_link(self, bf16):
        out = bf16.parent / "out"
        out.symlink_to(bf16.parent / "unmounted")
        self.refused(bf16, out)

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("content", ["notes.txt", ".hidden", "config.json", "layers-00.safetensors"])
    def test_a_foreign_directory(self, bf16, content, overwrite):
        out = bf16.parent / "out"
        out.mkdir()
        (out / content).write_text("precious")
        self.refused(bf16, out, "holds something else", content, overwrite=overwrite)
        assert (out / content).read_text() == "precious"
        assert len(list(out.iterdir())) == 1

    def test_the_parent_of_the_checkpoint(self, bf16):
        self.refused(bf16, bf16.parent, "holds something else", overwrite=True)

    def test_an_empty_directory_and_one_that_is_not_there(self, bf16, originals):
        empty = bf16.parent / "empty"
        empty.mkdir()
        for out in (empty, bf16.parent / "a" / "b"):
            assert run(bf16, out)[0]
            same_shards(out, originals / "out")

    def test_complete_already(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        before = snapshot(out)
        stamp = out.stat().st_mtime_ns
        assert run(bf16, out)[0] is False
        assert snapshot(out) == before
        assert out.stat().st_mtime_ns == stamp

    def test_overwriting_a_complete_one_writes_the_same_again(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        shard = next(out.glob("layers-*"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1  # of the right size: only verify would see it
        shard.write_bytes(data)
        assert run(bf16, out, overwrite=True)[0]
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before

    @pytest.mark.parametrize("damage", ["shard absent", "shard cut", "catalog cut", "report absent", "other version"])
    def test_a_damaged_one_is_refused_and_the_remedy_repairs_it(self, bf16, damage):
        out = bf16.parent / "out"
        run(bf16, out)
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        if damage == "shard absent":
            next(out.glob("layers-*")).unlink()
        elif damage == "shard cut":
            os.truncate(next(out.glob("layers-*")), 5000)
        elif damage == "catalog cut":
            os.truncate(out / "mosaic.json", 100)
        elif damage == "report absent":
            (out / "report.json").unlink()
        else:
            (out / "mosaic.json").write_text('{"format_version": 2}')
        assert "damaged" in self.refused(bf16, out, "--overwrite").problem
        assert run(bf16, out, overwrite=True)[0]
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before

    def test_another_source_with_equal_headers_is_another_source(self, bf16, tmp_path):
        """A fine-tune: same config, names, shapes, sizes. Never half of one and half of the other."""
        other = tmp_path / "tuned"
        shutil.copytree(bf16, other)
        edit(other, lambda tensors: tensors.update({name: t * 1.25 for name, t in tensors.items()}))
        for mine, yours in zip(sorted(other.glob("*.safetensors")), sorted(bf16.glob("*.safetensors")), strict=True):
            spans = [{name: info.span for name, info in read_header(file).items()} for file in (mine, yours)]
            assert spans[0] == spans[1]
        out = bf16.parent / "out"
        run(bf16, out)
        self.refused(other, out, "--overwrite")
        (out / "mosaic.json").unlink()  # as if stopped just before the end, with all its records
        (out / ".mosaic-convert").mkdir()
        with Checkpoint(bf16) as checkpoint:
            digest = make_plan(checkpoint, load_recipe("e4m3")).digest
        for shard in out.glob("*.safetensors"):
            record = {"version": 1, "plan": digest, "nbytes": shard.stat().st_size, "sha256": "", "tensors": []}
            (out / ".mosaic-convert" / f"{shard.name}.json").write_text(json.dumps(record))
        self.refused(other, out, "--overwrite")
        assert run(other, out, overwrite=True)[0]
        run(other, bf16.parent / "fresh")
        same_shards(out, bf16.parent / "fresh")

    def test_files_of_an_earlier_source_do_not_stay(self, bf16):
        out = bf16.parent / "out"
        (bf16 / "tokenizer.json").write_text("{}")
        run(bf16, out)
        (out / "mosaic.json").write_text("{")  # nothing to tell what is ours
        (bf16 / "tokenizer.json").unlink()
        assert run(bf16, out, overwrite=True)[0]
        assert not (out / "tokenizer.json").exists()
        assert all(result.holds for result in verify(out))

    def test_a_write_error_is_a_refusal_and_the_same_command_resumes(self, bf16, originals):
        out = bf16.parent / "out"
        limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "-", MOSAIC_CONVERT, bf16, out, "--workers", "1"]
        done = subprocess.run([str(word) for word in limited], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert "File too large" in done.stderr
        assert "run the same command again" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (out / "mosaic.json").exists()
        assert convert_program(bf16, out).returncode == 0
        same_shards(out, originals / "out")

    def test_the_result_of_another_recipe(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        before = snapshot(out)
        self.refused(bf16, out, "--overwrite", recipe="experts-only")
        assert snapshot(out) == before
        assert run(bf16, out, recipe="experts-only", overwrite=True)[0]
        assert all(result.holds for result in verify(out))
        fresh = bf16.parent / "fresh"
        run(bf16, fresh, recipe="experts-only")
        assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in fresh.iterdir())
        for file in fresh.iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name

    def test_another_source(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        edit_config(bf16, lambda config: config["text_config"].update(rms_norm_eps=1e-5))
        self.refused(bf16, out, "--overwrite")
        assert run(bf16, out, overwrite=True)[0]
        assert all(result.holds for result in verify(out))

    def test_smaller_results_leave_nothing_behind(self, bf16):
        out = bf16.parent / "out"
        run(bf16, out)
        assert (out / "mtp.safetensors").exists()
        recipe = bf16.parent / "text.yaml"
        recipe.write_text("rules: [{part: [mtp, vision], treatment: drop}, {treatment: keep}]")
        run(bf16, out, recipe=str(recipe), overwrite=True)
        assert not (out / "mtp.safetensors").exists()
        assert all(result.holds for result in verify(out))

    @pytest.mark.parametrize("shards", range(5))
    def test_resumed_after_any_shard(self, bf16, originals, monkeypatch, shards):
        """The same bytes as in one go, and nothing done twice."""
        out = bf16.parent / "out"
        write, count = ShardConversion.run, iter(range(100))

        def stop(self, *rest):
            if next(count) >= shards:  # and none after it
                raise KeyboardInterrupt
            write(self, *rest)

        monkeypatch.setattr(ShardConversion, "run", stop)
        if shards < 4:
            with pytest.raises(KeyboardInterrupt):
                run(bf16, out)
            assert not (out / "mosaic.json").exists()
        before = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
        assert len(before) == (shards if shards < 4 else 0)
        monkeypatch.setattr(ShardConversion, "run", write)
        run(bf16, out)
        assert all(file.stat().st_mtime_ns == stamp for file, stamp in before.items())
        assert sorted(file.name for file in out.iterdir()) == sorted(f.name for f in (originals / "out").iterdir())
        for file in (originals / "out").iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name

    def interrupted(self, folder, out, recipe, monkeypatch):
        """Every shard is there, nothing else."""

        def interrupt(plan, out):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "_complete", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(folder, out, recipe)

    def test_an_unfinished_one_of_another_recipe(self, bf16, monkeypatch):
        out = bf16.parent / "out"
        self.interrupted(bf16, out, "e4m3", monkeypatch)
        before = snapshot(out)
        self.refused(bf16, out, "--overwrite", recipe="experts-only")
        assert snapshot(out) == before
        run(bf16, out, recipe="experts-only", overwrite=True)
        assert all(result.holds for result in verify(out))

    def test_an_unfinished_one_with_more_shards(self, bf16, monkeypatch):
        out = bf16.parent / "out"
        self.interrupted(bf16, out, "e4m3", monkeypatch)
        recipe = bf16.parent / "text.yaml"
        recipe.write_text("rules: [{part: [mtp, vision], treatment: drop}, {treatment: keep}]")
        run(bf16, out, recipe=str(recipe), overwrite=True)
        assert {result.invariant: result.failures for result in verify(out) if not result.holds} == {}

    def test_two_at_once(self, bf16):
        out = bf16.parent / "out"
        with locked(out, None):
            self.refused(bf16, out, "another mosaic-convert")
            assert [file.name for file in out.rglob("*")] == [".mosaic-convert", "lock"]
        assert run(bf16, out)[0]

    def test_overwriting_while_another_is_at_work(self, bf16, monkeypatch):
        out = bf16.parent / "out"
        self.interrupted(bf16, out, "e4m3", monkeypatch)
        before = snapshot(out)
        with locked(out, None):
            self.refused(bf16, out, "another mosaic-convert", recipe="experts-only", overwrite=True)
            assert snapshot(out) == before

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_safetensors_of_somebody_else(self, bf16, overwrite):
        """They are neither removed nor left where engines would load them."""
        out = bf16.parent / "out"
        run(bf16, out)
        (out / "adapter_model.safetensors").write_bytes(b"precious")
        before = snapshot(out)
        self.refused(bf16, out, "adapter_model.safetensors", recipe="experts-only", overwrite=overwrite)
        assert snapshot(out) == before

    def test_a_link_to_itself(self, bf16):
        out = bf16.parent / "loop"
        out.symlink_to(out)
        self.refused(bf16, out, "leads nowhere")

    def test_a_full_disk(self, bf16, monkeypatch):
        usage = shutil.disk_usage(bf16)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
        self.refused(bf16, bf16.parent / "out", "1,000,000 bytes free")
        assert not (bf16.parent / "out").exists()

    def test_a_full_disk_does_not_cost_the_old_model(self, bf16, monkeypatch):
        """What --overwrite would replace counts as free, but goes only when there is room for the new."""
        out = bf16.parent / "out"
        run(bf16, out, recipe="experts-only")
        before = snapshot(out)
        usage = shutil.disk_usage(bf16)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        bf16_recipe = bf16.parent / "wide.yaml"
        bf16_recipe.write_text("rules: [{treatment: f32}]")
        self.refused(bf16, out, "not enough room", recipe=str(bf16_recipe), overwrite=True)
        assert snapshot(out) == before
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=500_000))
        assert run(bf16, out, recipe="e4m3", overwrite=True)[0]  # smaller than what it replaces
