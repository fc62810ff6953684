"""That the tiers' costs are those of answers on a device: the same words, with experts that come to lie there."""

from typer.testing import CliRunner

from bench.stand_in import app
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint, write_tokenizer


def test_more_and_more_lies_there(tmp_path):
    model = Tiny(layers=4, interval=2, mtp=False, visual=False)
    write_checkpoint(model, tmp_path / "source")
    write_tokenizer(tmp_path / "source", model.vocab)
    out = convert_folder(tmp_path / "source", tmp_path / "model")
    done = CliRunner().invoke(app, [str(out), "--answers", "3", "--tokens", "20"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    _, *rows = (line.split() for line in done.output.splitlines())
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(float(time) > 0 for row in rows for time in row[1:3])
    shares = [int(row[3].rstrip("%")) for row in rows]
    assert 0 < shares[0] < shares[2] <= 100
    assert float(rows[0][4]) > 0
