"""Ctrl-C, a polite kill, and a second converter: at any moment, in processes that are forked; see test_timed too."""

from support.killing import CATALOG, WORK, claims_nothing_false, is_complete, left_in, same_tree


def test_ctrl_c(disturbed, forker, made, out):
    """Says how to go on, and leaves nothing half behind."""
    for at, done in disturbed(made / "bf16", deed="int"):
        assert "Traceback" not in done.text, (at, done.text)
        left = left_in(out)
        assert not list(out.glob(f"{WORK}/*.partial")), at
        if not (out / CATALOG).exists():
            assert done.code == 130, (at, done.text)
            assert "same command" in done.text, (at, done.text)
        else:
            assert done.code in (0, 130)
            claims_nothing_false(out, made / "bf16-e4m3")
        forker.finish(made / "bf16", out)
        same_tree(out, made / "bf16-e4m3")
        left.is_kept(out)


def test_sigterm(disturbed, forker, made, out):
    """As kill -9, or better."""
    for at, done in disturbed(made / "bf16", deed="term"):
        assert done.code in (-15, 143), (at, done.text)
        claims_nothing_false(out, made / "bf16-e4m3")
        left = left_in(out)
        assert len(left.begun) <= 1
        forker.finish(made / "bf16", out)
        same_tree(out, made / "bf16-e4m3")
        left.is_kept(out)


def test_a_second_converter(disturbed, made, out):
    """Started while the first is at whatever it does: one of them writes, the other says why it does not."""
    for at, first in disturbed(made / "bf16", deed="stop"):
        second = first.meanwhile
        for done in (first, second):
            assert done.code in (0, 2), (at, done.text)
            assert done.code == 0 or "another mosaic-convert" in done.text, (at, done.text)
        assert 0 in (first.code, second.code), (at, first.text, second.text)
        same_tree(out, made / "bf16-e4m3")


def test_a_second_converter_with_another_plan(disturbed, forker, made, out):
    """The same, but the second wants to overwrite what the first writes: the directory is what one of them wants."""
    other = (made / "bf16", out, "--recipe", "experts-only", "--overwrite")
    results = {0: made / "bf16-e4m3", 1: made / "bf16-experts-only"}
    for at, first in disturbed(made / "bf16", deed="stop", meanwhile=other):
        for done in (first, first.meanwhile):
            assert done.code in (0, 2), (at, done.text)
            assert "Traceback" not in done.text
        good = [results[i] for i, done in enumerate((first, first.meanwhile)) if done.code == 0]
        assert good, (at, first.text, first.meanwhile.text)
        assert any(is_complete(out, result) for result in good), (at, first.text, first.meanwhile.text)
        forker.finish(made / "bf16", out, "--overwrite")
        same_tree(out, made / "bf16-e4m3")
