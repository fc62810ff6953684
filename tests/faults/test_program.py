"""mosaic-convert as a program: exit codes, streams, remedies that work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mosaic.convert.verify import verify
from support.faults import (
    NORM,
    TEXT,
    convert_program,
    converts,
    edit,
    edit_config,
    file_of,
    run,
    same_shards,
    set_element,
)
from support.shards import INDEX, write_index


class TestProgram:
    @pytest.mark.parametrize(
        "fault", ["model_type", "missing", "unknown", "mis-shaped", "truncated", "absent file", "recipe", "foreign OUT"]
    )
    def test_refusals_exit_with_2_and_write_nothing(self, bf16, fault):
        out, recipe = bf16.parent / "out", "e4m3"
        if fault == "model_type":
            edit_config(bf16, lambda config: config.update(model_type="mixtral"))
        elif fault == "missing":
            edit(bf16, lambda tensors: tensors.pop(NORM))
        elif fault == "unknown":
            edit(bf16, lambda tensors: tensors.update({"model.surprise": torch.ones(1)}))
        elif fault == "mis-shaped":
            edit(bf16, lambda tensors: tensors.update({NORM: tensors[NORM][:-1].clone()}))
        elif fault == "truncated":
            os.truncate(file_of(bf16, NORM), 1000)
        elif fault == "absent file":
            file_of(bf16, NORM).unlink()
        elif fault == "recipe":
            recipe = "e5m2"
        else:
            out.mkdir()
            (out / "precious").write_text("")
        done = convert_program(bf16, out, "--recipe", recipe)
        assert done.returncode == 2
        assert "\nerror: " in f"\n{done.stderr}"
        assert "remedy:" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert not out.exists() or [file.name for file in out.iterdir()] == ["precious"]

    def test_nan_is_refused_and_the_remedy_works(self, bf16):
        set_element(bf16, f"{TEXT}layers.0.linear_attn.in_proj_z.weight", (3, 4), float("nan"))
        out = bf16.parent / "out"
        done = convert_program(bf16, out, "--workers", 1)
        assert done.returncode == 2
        assert "in_proj_z" in done.stderr
        assert "--nonfinite zero" in done.stderr
        done = convert_program(bf16, out, "--nonfinite", "zero", "--overwrite", "--json", "--workers", 1)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["written"] is True
        assert all(result.holds for result in verify(out))

    def test_a_plan_writes_nothing_and_reports_what_is_ignored(self, bf16):
        save_file({"x": torch.ones(1)}, bf16 / "stray.safetensors")
        out = bf16.parent / "out"
        done = convert_program(bf16, out, "--plan", "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["unlisted"] == ["stray.safetensors"]
        assert "stray.safetensors" in done.stderr
        assert not out.exists()

    def test_the_output_does_not_depend_on_the_workers(self, bf16, originals):
        out = bf16.parent / "out"
        assert convert_program(bf16, out, "--workers", 4).returncode == 0
        for file in (originals / "out").iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_index_writer_of_these_tests_is_sound(bf16, originals):
    """`edit` without a change changes nothing that counts."""
    edit(bf16, lambda tensors: None)
    write_index(bf16, json.loads((bf16 / INDEX).read_text())["weight_map"], 1.0)
    converts(bf16)
    same_shards(bf16.parent / "out", originals / "out")


@pytest.mark.parametrize("closed", ["1", "2"])
def test_streams_that_were_closed(bf16, tmp_path, closed):
    """As by some daemons: no traceback, no exit code that means something else."""
    out = tmp_path / "out"
    programs = Path(sys.executable).parent
    for command in (f"mosaic-convert {bf16} {out}", f"mosaic-verify {out}", f"mosaic-report {out} --against {bf16}"):
        done = subprocess.run(
            f"{programs}/{command} {closed}>&-", shell=True, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (command, done)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("program", ["mosaic-verify {out}", "mosaic-report {out} --against {bf16}"])
def test_kernels_that_do_not_exist(bf16, tmp_path, program):
    run(bf16, tmp_path / "out")
    command = program.format(out=tmp_path / "out", bf16=bf16).split()
    environment = os.environ | {"MOSAIC_ISA": "abacus"}
    done = subprocess.run(
        [Path(sys.executable).with_name(command[0]), *command[1:]], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr
